"""`kvp train --heads auto`: the KV heads that one of several processes trains.

Every process of a Slurm array, of srun or of torchrun writes a shard, in a folder of `--out`;
`kvp merge` joins them.
"""

from dataclasses import replace

from kvp.artifacts.addresses import place
from kvp.devices import device_of_rank
from kvp.errors import UsageError
from kvp.processes import Rank, rank_of
from kvp.store.metadata import load_metadata
from train.config import TrainConfig

SHARD_FOLDER = "heads-{start}-{stop}"
"""Folder in `--out` of a process that trains some heads."""


def take_share_of_heads(config: TrainConfig) -> TrainConfig:
    """The settings with the heads, the folder and the device of this process.

    A process that is alone trains all heads, in `--out` itself. Raises UsageError where there are
    more processes than heads, and what the store raises.
    """
    rank = rank_of(None, None)
    if not rank.shared:
        return replace(config, heads=None)
    heads = share_of_heads(rank, load_metadata(place(config.traces))[1].geometry.total_kv_heads)
    return replace(
        config,
        heads=f"{heads.start}:{heads.stop}",
        out=str(place(config.out) / SHARD_FOLDER.format(start=heads.start, stop=heads.stop)),
        device=device_of_rank(config.device, rank),
    )


def share_of_heads(rank: Rank, total: int) -> range:
    """Heads of one process, consecutive; shares differ by at most one. UsageError for none."""
    if rank.count > total:
        raise UsageError(f"--heads auto: {rank.count} processes, but only {total} KV heads")
    return range(rank.index * total // rank.count, (rank.index + 1) * total // rank.count)
