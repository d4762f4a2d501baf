"""Results of the studies as numbers: means over seeds, accuracies over prompts."""

from __future__ import annotations

import functools
import json
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from scipy import stats
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from eval.stats import Interval, Scores, by_policy, paired_difference, perplexity

Result = dict[str, Any]


@dataclass(frozen=True)
class Mean:
    """Mean over seeds and half of its 95 % interval (Student's t); NaN for a single seed."""

    mean: float
    half: float

    def __str__(self) -> str:
        """Three digits."""
        return f"{self.mean:.3f}" if np.isnan(self.half) else f"{self.mean:.3f} ± {self.half:.3f}"


def mean_of(values: Iterable[float]) -> Mean:
    """Mean of one value per seed with its interval."""
    numbers = np.array(list(values), dtype=float)
    if len(numbers) < 2:
        return Mean(float(numbers.mean()), float("nan"))
    error = numbers.std(ddof=1) / len(numbers) ** 0.5
    return Mean(float(numbers.mean()), float(stats.t.ppf(0.975, len(numbers) - 1) * error))


def results_of(study: Path) -> dict[str, list[Result]]:
    """Arm -> results of its seeds, for every trained arm; `folder` is the policy's."""
    by_arm: dict[str, list[Result]] = defaultdict(list)
    for path in sorted((study / "final").glob("*/seed*/result.json")):
        by_arm[path.parts[-3]].append({**json.loads(path.read_text()), "folder": path.parent})
    return dict(by_arm)


def transfers(study: Path) -> tuple[dict[str, list[Result]], list[str]]:
    """Kind of trace -> results of the policies trained on it, and the test stores of all."""
    by_kind = {folder.name: results_of(folder).get("all", []) for folder in sorted(study.iterdir())}
    by_kind = {kind: results for kind, results in by_kind.items() if results}
    return by_kind, sorted({name for rs in by_kind.values() for name in rs[0]["elsewhere"]})


def validation_curve(policy: Path) -> dict[int, float]:
    """Step -> skill on validation sequences, as kvp-train logged it."""
    logs = EventAccumulator(str(policy / "logs"))
    logs.Reload()
    return {event.step: event.value for event in logs.Scalars("held_out/skill")}


def over_seeds(results: Sequence[Result], value: Callable[[Result], float]) -> Mean:
    """Mean over the seeds of an arm."""
    return mean_of(value(result) for result in results)


def records_of(folder: Path, **fields: str) -> dict[str, list[Result]]:
    """Arm -> records of kvp-eval with these fields, from policies named `ARM.seedN`."""
    by_arm: dict[str, list[Result]] = defaultdict(list)
    for record in _all_records(folder):
        if all(record[name] == value for name, value in fields.items()):
            by_arm[(record["policy"] or record["method"]).split(".seed")[0]].append(record)
    return dict(by_arm)


@functools.lru_cache(maxsize=1)
def _all_records(folder: Path) -> list[Result]:
    with (folder / "rows.jsonl").open() as lines:
        return [json.loads(line) for line in lines]


def accuracy(records: Sequence[Result]) -> Mean:
    """Mean score in %, over prompts for every seed, and its interval over seeds."""
    by_seed: dict[Any, list[float]] = defaultdict(list)
    for record in records:
        if record["score"] is not None:
            by_seed[record["policy"]].append(100 * record["score"])
    return mean_of(float(np.mean(scores)) for scores in by_seed.values())


def difference(ours: Sequence[Result], theirs: Sequence[Result]) -> Interval:
    """Points of accuracy by which ours is better, over the same prompts (bootstrap)."""
    interval = paired_difference(by_policy(ours), by_policy(theirs))
    return Interval(
        mean=100 * interval.mean,
        low=100 * interval.low,
        high=100 * interval.high,
        prompts=interval.prompts,
        p=interval.p,
    )


def nats(ours: Sequence[Result], theirs: Sequence[Result]) -> Interval:
    """Nats per token by which ours is worse, over the same continuations (bootstrap)."""
    return paired_difference(_nats_per_token(ours), _nats_per_token(theirs), bounds=None)


def _nats_per_token(records: Sequence[Result]) -> Scores:
    return by_policy(
        ({**record, "nll": record["nll"] / record["reply_tokens"]} for record in records), "nll"
    )


def ppl(records: Sequence[Result]) -> Interval:
    """Perplexity, seeds pooled."""
    return perplexity(records)
