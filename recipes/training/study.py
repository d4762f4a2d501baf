"""Train the arms of a study, tuned on validation sequences, and evaluate them on test sequences.

    python recipes/training/study.py objectives --traces RUN/traces --out RUN/objectives \
        --config configs/training/nano.yaml
    python recipes/training/study.py inputs ... --chosen RUN/objectives    # at what it chose there

Writes OUT/tune/ARM/SETTING, OUT/final/ARM/seedN (policy directories) and next to each policy a
result.json. Started again, it continues. Each run uses one thread; `--workers` run side by side.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import io
import json
import multiprocessing
import os
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import arms
import torch
import yaml
from arms import FIRST_LEARNING_RATE, FIRST_TEMPERATURE, LEARNING_RATES, TEMPERATURES, Arm, Settings
from torch import Tensor

from kvp.cli import parse
from kvp.ranking import Protection
from kvp.store import TraceReader
from policies import load_policy
from policies.ranker import HeadRankers, parameters_per_head
from train.config import TrainConfig
from train.data.compression_points import held_out_points
from train.data.contexts import Context, ContextSource
from train.data.store_checks import usable
from train.model.shared import SharedRankers
from train.recipe import PRESETS
from train.run import Sources, run
from train.validation import evaluate

RESULT = "result.json"
STUDIES = {
    "objectives": arms.OBJECTIVES,
    "rewards": arms.REWARDS,
    "labels": arms.LABELS,
    "inputs": arms.INPUTS,
    "sizes": arms.SIZES,
    "sharing": arms.SHARING,
    "sequences": arms.SEQUENCES,
    "steps": arms.STEPS,
    "lengths": arms.LENGTHS,
    "longer": arms.LONGER,
    "quick": arms.QUICK,
    "plain": arms.INPUTS[:1],
}


@dataclass(frozen=True, kw_only=True)
class Study:
    """Where a study happens and with what."""

    traces: Path
    config: Path
    out: Path
    seeds: int
    chosen: Path | None
    """Folder of an `objectives` study whose choices are used instead of tuning."""
    temperatures: Path | None
    """Folder of an `objectives` study whose strengths of softening are used, untuned."""
    elsewhere: tuple[Path, ...]
    """Other stores whose test sequences the policies are evaluated on."""

    def run(self, arm: Arm) -> None:
        """Tune an arm, or look up what was chosen for its objective; train its seeds."""
        settings = self._looked_up(arm) if self.chosen else self._tuned(arm)
        for seed in range(self.seeds):
            self._result(f"final/{arm.name}/seed{seed}", arm, {**settings, "seed": str(seed)})

    def _settings(self, arm: Arm) -> Settings:
        given = yaml.safe_load(self.config.read_text())
        settings = {**{name: str(value) for name, value in given.items()}, **arm.settings}
        if not arm.one_ranking:
            return settings
        episodes = given["contexts"] * given["permutations"]
        return {**settings, "contexts": str(episodes), "permutations": "1"}

    def _looked_up(self, arm: Arm) -> Settings:
        assert self.chosen is not None
        chosen = chosen_in(self.chosen, arm.like)
        return {name: chosen[name] for name in ("objective", "lr", "temperature") if name in chosen}

    def _tuned(self, arm: Arm) -> Settings:
        """Coordinate search: the temperature, then the learning rate until its neighbours lose."""
        settings = {"lr": FIRST_LEARNING_RATE}
        if arm.softened and self.temperatures:
            settings["temperature"] = chosen_in(self.temperatures, arm.name)["temperature"]
        elif arm.softened:
            settings["temperature"] = climb(
                TEMPERATURES,
                FIRST_TEMPERATURE,
                lambda t: self._skill(arm, {**settings, "temperature": t}),
            )
        best = climb(
            LEARNING_RATES, FIRST_LEARNING_RATE, lambda lr: self._skill(arm, {**settings, "lr": lr})
        )
        return {**settings, "lr": best}

    def _skill(self, arm: Arm, settings: Settings) -> float:
        name = "_".join(f"{key}{value}" for key, value in sorted(settings.items()))
        tuning = {**settings, "seed": "100", "calibration": "none"}
        return float(self._result(f"tune/{arm.name}/{name}", arm, tuning)["validation_skill"])

    def _result(self, name: str, arm: Arm, settings: Settings) -> dict[str, Any]:
        """Result of one run, trained unless it is there; ValueError if that had other settings."""
        folder = self.out / name
        settings = {**self._settings(arm), **settings}
        if not (folder / RESULT).exists():
            began, processor = time.monotonic(), time.process_time()
            train(self.traces, folder, settings)
            result = {
                "arm": arm.name,
                "settings": settings,
                "seconds": time.monotonic() - began,
                "processor_seconds": time.process_time() - processor,
                **validation_skill(folder),
            }
            if name.startswith("final"):
                result |= tested(folder, self.traces, settings)
                result["elsewhere"] = {
                    path.name: tested(folder, path, settings)["skill"] for path in self.elsewhere
                }
            partial = folder / f"{RESULT}.partial"
            partial.write_text(json.dumps(result))
            partial.rename(folder / RESULT)
            print(f"{name} {result['validation_skill']:.4f}", flush=True)
        result: dict[str, Any] = json.loads((folder / RESULT).read_text())
        if result["settings"] != settings:
            raise ValueError(f"{folder} was trained with other settings: remove it, or use --out")
        return result


def chosen_in(study: Path, arm: str) -> Settings:
    """Settings that an `objectives` study chose for an arm."""
    settings: Settings = json.loads((study / "final" / arm / "seed0" / RESULT).read_text())[
        "settings"
    ]
    return settings


def climb(grid: tuple[str, ...], start: str, evaluate: Callable[[str], float]) -> str:
    """The best value of a grid that both its neighbours (where it has any) are worse than."""
    best, scores = grid.index(start), {}
    while True:
        near = [i for i in (best - 1, best, best + 1) if 0 <= i < len(grid)]
        for index in near:
            if index not in scores:
                scores[index] = evaluate(grid[index])
        if (top := max(near, key=lambda i: scores[i])) == best:
            return grid[best]
        best = top


def train(traces: Path, folder: Path, settings: Settings) -> None:
    """Run kvp-train with these flags; runs of one process read a store once."""
    flags = [part for key, value in settings.items() for part in (f"--{key}", value)]
    config = parse(
        TrainConfig, ["--traces", str(traces), "--out", str(folder), *flags], prog="kvp-train"
    )
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        run(config, sources_of(traces))


@functools.cache
def sources_of(traces: Path) -> Sources:
    """Contexts of a store, shared by the runs of this process."""
    return {}


def validation_skill(folder: Path) -> dict[str, float]:
    """Mean skill over heads on validation sequences, as kvp-train measured it."""
    records = json.loads((folder / "policy.json").read_text())["held_out"]
    skills = [record["skill"] for record in records if record["skill"] is not None]
    return {"validation_skill": sum(skills) / len(skills)}


def tested(folder: Path, traces: Path, settings: Settings) -> dict[str, Any]:
    """Metrics of a policy on the store's test sequences.

    Protected tokens take no part, for every arm, whatever it was trained on.
    """
    policy = load_policy(folder)
    protection = Protection()
    contexts = test_contexts(traces)
    result = evaluate(policy.rankers, contexts, reward_protection=protection)
    orders = []
    with torch.no_grad():
        for context in contexts:
            score = policy.rankers(context.keys, context.values, context.positions, context.length)
            free = protection.competing(context.length)
            orders.append(rank_correlation(score[:, free], context.importance[:, free]))
    return {
        "skill": float(result.skill.nanmean()),
        "skill_by_head": result.skill.tolist(),
        "area": float(result.area.mean()),
        "oracle_area": float(result.oracle_area.mean()),
        "lost": {budget: float(lost.mean()) for budget, lost in result.lost.items()},
        "rank_correlation": float(torch.stack(orders).mean()),
        "parameters": parameters_per_head(policy.rankers.spec),
        "trained_parameters": trained_parameters(policy.rankers, settings),
        "contexts": len(contexts),
    }


def trained_parameters(rankers: HeadRankers, settings: Settings) -> int:
    """Weights that training had: of all heads' networks, or of the one that they share."""
    shared = settings.get("sharing") == "model"
    network = (SharedRankers if shared else HeadRankers)(rankers.spec, rankers.total_kv_heads)
    return network.parameter_count


@functools.cache
def test_contexts(traces: Path) -> list[Context]:
    """At most 96 contexts of test sequences, at the points where the default preset validates."""
    reader = TraceReader(traces)
    recipe = PRESETS["fourier"]
    source = ContextSource(reader, memory_bytes=int(2e9))
    points = held_out_points(usable(reader, "test", recipe), recipe, limit=96)
    return [source.context(point) for point in points]


def rank_correlation(scores: Tensor, importance: Tensor) -> Tensor:
    """Spearman's correlation of two [A, N] tensors along the tokens: [A]."""
    ranks = [values.argsort(-1).argsort(-1).double() for values in (scores, importance)]
    centred = [rank - rank.mean(-1, keepdim=True) for rank in ranks]
    both: Tensor = torch.stack(centred).square().sum(-1).prod(0).sqrt()
    return (centred[0] * centred[1]).sum(-1) / both


def _arm(work: tuple[Study, Arm]) -> None:
    torch.set_num_threads(1)
    work[0].run(work[1])


def run_all(study: Study, chosen: Iterable[Arm], workers: int) -> None:
    """Run arms, `workers` at a time; a single worker is this process."""
    jobs = [(study, arm) for arm in chosen]
    if workers == 1:
        for job in jobs:
            _arm(job)
        return
    with multiprocessing.get_context("spawn").Pool(workers) as pool:
        for _ in pool.imap_unordered(_arm, jobs):
            pass


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("study", choices=STUDIES)
    parser.add_argument("--traces", type=Path, required=True)
    parser.add_argument("--config", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--chosen", type=Path, help="folder of the objectives study")
    parser.add_argument("--temperatures", type=Path, help="study whose temperatures are used")
    parser.add_argument("--arms", help="only these, comma separated")
    parser.add_argument("--elsewhere", type=Path, nargs="*", default=[], help="other stores")
    parser.add_argument("--workers", type=int, default=os.cpu_count())
    given = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    study = Study(
        traces=given.traces,
        config=given.config,
        out=given.out,
        seeds=given.seeds,
        chosen=given.chosen,
        temperatures=given.temperatures,
        elsewhere=tuple(given.elsewhere),
    )
    known = {arm.name: arm for arm in STUDIES[given.study]}
    named = given.arms.split(",") if given.arms else list(known)
    if unknown := [name for name in named if name not in known]:
        parser.error(f"--arms: no arm {unknown[0]!r}; use some of {','.join(known)}")
    run_all(study, [known[name] for name in named], given.workers)


if __name__ == "__main__":
    main()
