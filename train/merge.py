"""`kvp merge`: join policies of some KV heads each (`train.process_share`).

Heads train independently of each other, from weights and noise that are drawn for the whole model,
so the merged policy is the one that a single run would have written.
"""

from collections.abc import Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

from kvp.artifacts.claim import OutputFolder
from kvp.artifacts.manifest import differences
from kvp.errors import PolicyError, UsageError
from kvp.specification import split_list
from policies.learned import Calibration
from policies.policy_files import POLICY, PolicyMeta, Shard, load_shard, save_policy
from policies.ranker import HeadRankers
from policies.sources import INDEX
from train.config import RUN_SETTINGS, MergeConfig
from train.learning.calibration import calibration_of
from train.process_share import SHARD_FOLDER


def run(config: MergeConfig) -> None:
    """Write `config.out` from `config.shards`.

    Raises PolicyError where a shard is damaged or a whole policy, where shards do not belong
    together or do not cover every head exactly once, or where `config.out` holds other files.
    """
    folders = [folder for path in split_list(config.shards) for folder in list_shards(path)]
    named = {folder: load_shard(folder) for folder in folders}
    if not named:
        raise UsageError("--shards names no directories")
    for folder, shard in named.items():
        if shard.meta.heads is None:
            raise PolicyError(f"--shards {folder} is a whole policy already, not a shard of one")
    check_same_run(named)
    shards = sort_by_heads(list(named.values()))
    with OutputFolder.claim(Path(config.out), POLICY, {}) as target:
        if target.existing_marker is not None:
            raise PolicyError(f"--out {config.out} already holds a policy; name a new folder")
        states = [state for shard in shards for state in shard.rankers.head_states()]
        rankers = HeadRankers.from_head_states(shards[0].rankers.spec, states)
        calibration = join_calibrations(shards)
        save_policy(config.out, rankers, join_meta(shards), calibration=calibration)
    print(f"{config.out}: {len(states)} KV heads from {len(shards)} shards")


def list_shards(folder: str) -> list[str]:
    """A shard, or those that `kvp train --heads auto` has written into a folder."""
    inside = sorted(Path(folder).glob(SHARD_FOLDER.format(start="*", stop="*")))
    return [folder] if (Path(folder) / INDEX).exists() or not inside else list(map(str, inside))


def check_same_run(named: dict[str, Shard]) -> None:
    """Raise PolicyError, naming two shards and what differs, unless all are of one run."""
    (first, reference), *others = [(name, _shared_settings(shard)) for name, shard in named.items()]
    for name, settings in others:
        if different := differences(reference, settings):
            raise PolicyError(
                f"{name} is no shard of the policy that {first} is one of "
                f"({'; '.join(different[:3])})"
            )


def _shared_settings(shard: Shard) -> dict[str, Any]:
    """Settings that all shards of a policy must share; JSON."""
    training = shard.meta.training
    return {
        "ranker": shard.rankers.spec.to_dict(),
        "model": dict(shard.meta.model),
        **{name: training.get(name) for name in ("seed", "traces", "recipe", "code")},
        "settings": {name: training.get("config", {}).get(name) for name in RUN_SETTINGS},
    }


def sort_by_heads(shards: Sequence[Shard]) -> list[Shard]:
    """Shards by their first head; PolicyError unless they hold every head exactly once."""
    ordered = sorted(shards, key=lambda shard: shard.meta.head_range.start)
    total = shards[0].meta.geometry.total_kv_heads
    ends = [0, *(shard.meta.head_range.stop for shard in ordered)]
    for shard, end in zip([*ordered, None], ends, strict=True):
        start = total if shard is None else shard.meta.head_range.start
        if start != end:
            what = "no shard has" if start > end else "more than one has"
            raise PolicyError(
                f"--shards make no policy of {total} heads: {what} heads "
                f"{min(start, end)}:{max(start, end)}"
            )
    return ordered


def join_calibrations(shards: Sequence[Shard]) -> Calibration | None:
    """Calibration of all heads: the same maps."""
    maps = [shard.calibration for shard in shards if shard.calibration is not None]
    if len(maps) < len(shards):
        return None
    heads = chain.from_iterable(zip(one.scores, one.values, strict=True) for one in maps)
    knots = [(scores.double().numpy(), values.double().numpy()) for scores, values in heads]
    return calibration_of(maps[0].target, knots)


def join_meta(shards: Sequence[Shard]) -> PolicyMeta:
    """Metadata as of a single run; `shards` records how the parts were made."""
    first = shards[0].meta
    training = dict(first.training)
    training["config"] = {**training.get("config", {}), "heads": None}
    training["best_step"] = [step for shard in shards for step in shard.meta.training["best_step"]]
    training["shards"] = [
        {
            "heads": [shard.meta.head_range.start, shard.meta.head_range.stop],
            **{name: shard.meta.training.get(name) for name in ("command", "created")},
        }
        for shard in shards
    ]
    held_out = [metrics for shard in shards for metrics in shard.meta.held_out]
    return replace(first, training=training, held_out=held_out, heads=None)
