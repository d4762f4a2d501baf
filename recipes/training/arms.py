"""Train the arms of a study: tuned on validation sequences, judged on validation and test ones.

Writes RUN/tune/ARM/SETTING and RUN/final/ARM/seedN (policy directories of kvp train), and into each
a result.json. Started again, it continues: kvp train from its checkpoint.
"""

from __future__ import annotations

import contextlib
import functools
import io
import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kvp.program.command_line import parse
from kvp.ranking import Protection
from kvp.store import TraceReader
from policies.policy_files import load_shard
from policies.ranker import parameters_per_head
from recipes.training.settings import SPLITS, Arm, Flags, Grid, Settings
from train.config import TrainConfig
from train.data.compression_points import held_out_points
from train.data.contexts import ContextSource, RankingContext, scores_of
from train.data.training_data import usable_records
from train.learning.validation import evaluate
from train.recipe import PRESETS
from train.run import Sources, run

RESULT = "result.json"
MAX_CONTEXTS = 96
"""Contexts of a split that a policy is judged on, at most."""

Result = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Training:
    """Where the arms of a study are trained."""

    settings: Settings
    run: Path

    @property
    def traces(self) -> Path:
        """The trace store of all arms."""
        return self.run / "traces"

    def arm(self, arm: Arm) -> None:
        """Tune an arm, then train its seeds."""
        grids = {name: self.settings.tuning.grids[name] for name in arm.tuned}
        flags = dict(arm.settings) if arm.complete else {**self.settings.train, **arm.settings}
        flags |= {name: grid.first for name, grid in grids.items()}
        for name, grid in grids.items():
            flags[name] = self._climb(arm, grid, name, flags)
        for seed in range(arm.seeds):
            self._result(self.folder(arm.name, seed), arm, {**flags, "seed": str(seed)})

    def folder(self, arm: str, seed: int) -> Path:
        """The policy of a seed of an arm."""
        return self.run / "final" / arm / f"seed{seed}"

    def finished(self, arm: Arm) -> bool:
        """Whether all seeds of an arm are trained."""
        return all((self.folder(arm.name, seed) / RESULT).exists() for seed in range(arm.seeds))

    def _climb(self, arm: Arm, grid: Grid, name: str, flags: Flags) -> str:
        def skill(value: str) -> float:
            changed = {**flags, name: value}
            label = "_".join(f"{flag}{changed[flag]}" for flag in arm.tuned)
            seed = {"seed": str(self.settings.tuning.seed), "calibration": "none"}
            folder = self.run / "tune" / arm.name / label
            return float(self._result(folder, arm, {**changed, **seed})["held_out_skill"])

        return climb(grid, skill)

    def _result(self, folder: Path, arm: Arm, flags: Flags) -> Result:
        """Result of one run, trained unless it is there; SystemExit if that had other settings."""
        path = folder / RESULT
        if not path.exists():
            continued = folder.exists()
            began, processor = time.monotonic(), time.process_time()
            train(self.traces, folder, flags)
            result = {
                "arm": arm.name,
                "settings": flags,
                "seconds": None if continued else time.monotonic() - began,
                "processor_seconds": None if continued else time.process_time() - processor,
                "held_out_skill": held_out_skill(folder),
            }
            if folder.is_relative_to(self.run / "final"):
                result |= {split: judged(folder, self.traces, split) for split in SPLITS}
            partial = folder / f"{RESULT}.partial"
            partial.write_text(json.dumps(result))
            partial.rename(path)
            print(f"{folder.relative_to(self.run)} {result['held_out_skill']:.4f}", flush=True)
        result = json.loads(path.read_text())
        if result["settings"] != flags:
            raise SystemExit(f"{folder} was trained with other settings: remove it, or use another")
        return result


def climb(grid: Grid, score: Callable[[str], float]) -> str:
    """The value of a grid that both its neighbours (where it has any) score less than."""
    best, scores = grid.values.index(grid.first), {}
    while True:
        near = [i for i in (best - 1, best, best + 1) if 0 <= i < len(grid.values)]
        for index in near:
            if index not in scores:
                scores[index] = score(grid.values[index])
        if (top := max(near, key=lambda i: scores[i])) == best:
            return grid.values[best]
        best = top


def train(traces: Path, folder: Path, flags: Flags) -> None:
    """Run kvp train; runs of one process read a store once."""
    arguments = [part for name, value in flags.items() for part in (f"--{name}", value)]
    given = ["--traces", str(traces), "--out", str(folder), *arguments]
    config = parse(TrainConfig, given, prog="kvp train")
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        run(config, sources_of(traces))


@functools.cache
def sources_of(traces: Path) -> Sources:
    """Contexts of a store, shared by the runs of this process."""
    return {}


def held_out_skill(folder: Path) -> float:
    """Mean skill over heads on validation sequences, as kvp train measured it."""
    records = json.loads((folder / "policy.json").read_text())["held_out"]
    skills = [record["skill"] for record in records if record["skill"] is not None]
    return float(sum(skills) / len(skills))


def judged(folder: Path, traces: Path, split: str) -> Result:
    """Metrics of a policy, or of a shard's heads, on sequences of a split of the store.

    Protected tokens take no part, for every arm, whatever it was trained on.
    """
    shard = load_shard(folder)
    rankers, heads = shard.rankers.eval(), shard.meta.head_range
    protection = Protection()
    contexts = contexts_of(traces, split, rankers.spec.reads_queries, heads)
    result = evaluate(rankers, contexts, reward_protection=protection)
    orders = []
    with torch.no_grad():
        for context in contexts:
            score = scores_of(rankers, context)
            free = protection.competing(context.length)
            orders.append(rank_correlation(score[:, free], context.importance[:, free]))
    return {
        "skill": float(result.skill.nanmean()),
        "skill_by_head": result.skill.tolist(),
        "area": float(result.area.mean()),
        "oracle_area": float(result.oracle_area.mean()),
        "lost": {budget: float(lost.mean()) for budget, lost in result.lost.items()},
        "rank_correlation": float(torch.stack(orders).mean()),
        "parameters": parameters_per_head(rankers.spec),
        "contexts": len(contexts),
    }


@functools.cache
def contexts_of(traces: Path, split: str, recent: bool, heads: range) -> list[RankingContext]:
    """Contexts of a split, at the points where the default preset validates."""
    reader = TraceReader(traces, heads=slice(heads.start, heads.stop))
    recipe = PRESETS["fourier"]
    source = ContextSource(reader, memory_bytes=int(2e9), recent=recent)
    points = held_out_points(usable_records(reader, split, recipe), recipe, limit=MAX_CONTEXTS)
    return [source.context(point) for point in points]


def rank_correlation(scores: Tensor, importance: Tensor) -> Tensor:
    """Spearman's correlation of two [A, N] tensors along the tokens: [A]."""
    ranks = [values.argsort(-1).argsort(-1).double() for values in (scores, importance)]
    centred = [rank - rank.mean(-1, keepdim=True) for rank in ranks]
    both: Tensor = torch.stack(centred).square().sum(-1).prod(0).sqrt()
    return (centred[0] * centred[1]).sum(-1) / both
