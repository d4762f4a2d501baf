"""`--heads auto`: every process of a Slurm array, of srun or of torchrun trains its own KV heads.

The processes do not talk to each other; each writes a shard of its own, in a folder of `--out`
that kvp merge takes as a whole.
"""

from __future__ import annotations

from dataclasses import replace

from kvp.artifacts.addresses import place
from kvp.config_groups import Rank, rank_of
from kvp.errors import UsageError
from kvp.geometry import Geometry
from kvp.hf import geometry_of, load_config
from kvp.hf.loading import device_of_rank
from kvp.store.store_manifest import load_metadata
from train.config import TrainConfig
from train.head_range import SHARD_FOLDER


def own_heads(config: TrainConfig) -> TrainConfig:
    """The settings with the heads, the folder and the device of this process.

    A process that is alone trains all heads, in `--out` itself. Raises UsageError where there are
    more processes than heads, and what the store or the model's configuration raise.
    """
    rank = rank_of(None, None)
    if not rank.shared:
        return replace(config, heads=None)
    heads = heads_of(rank, _geometry(config).total_kv_heads)
    return replace(
        config,
        heads=f"{heads.start}:{heads.stop}",
        out=str(place(config.out) / SHARD_FOLDER.format(start=heads.start, stop=heads.stop)),
        device=device_of_rank(config.device, rank),
    )


def heads_of(rank: Rank, total: int) -> range:
    """Consecutive heads of a process, as many as every other's or one more; UsageError for none."""
    if rank.count > total:
        raise UsageError(f"--heads auto: {rank.count} processes, but only {total} KV heads")
    return range(rank.index * total // rank.count, (rank.index + 1) * total // rank.count)


def _geometry(config: TrainConfig) -> Geometry:
    if config.traces is not None:
        return load_metadata(place(config.traces))[1].geometry
    return geometry_of(load_config(config.model, revision=config.revision))
