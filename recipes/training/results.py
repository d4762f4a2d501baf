"""Results of a study as numbers: means over seeds, answers over prompts and seeds."""

from __future__ import annotations

import functools
import json
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from scipy import stats

from eval.results.stats import Interval, bootstrap_mean, paired_difference, prompt_values
from recipes.training.arms import RESULT, Result


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


def over_seeds(results: Sequence[Result], value: Callable[[Result], float]) -> Mean:
    """Mean over the seeds of an arm."""
    return mean_of(value(result) for result in results)


def results_of(run: Path) -> dict[str, list[Result]]:
    """Arm -> results of its seeds, for every trained arm."""
    by_arm: dict[str, list[Result]] = defaultdict(list)
    for path in sorted((run / "final").glob(f"*/seed*/{RESULT}")):
        by_arm[path.parts[-3]].append(json.loads(path.read_text()))
    return dict(by_arm)


def records_of(folder: Path, **fields: object) -> dict[str, list[Result]]:
    """Arm (or `full`) -> answers of kvp eval with these fields, of policies `ARM.seedN`."""
    by_arm: dict[str, list[Result]] = defaultdict(list)
    for record in _all_records(folder):
        if record["score"] is None or record["protocol"] != fields["protocol"]:
            continue
        if record["method"] == "full" or all(record[name] == fields[name] for name in fields):
            by_arm[(record["policy"] or record["method"]).split(".seed")[0]].append(record)
    return dict(by_arm)


@functools.lru_cache(maxsize=2)
def _all_records(folder: Path) -> list[Result]:
    with (folder / "rows.jsonl").open() as lines:
        return [json.loads(line) for line in lines]


def accuracy(records: Sequence[Result]) -> Interval:
    """Mean score in %, with its interval over prompts and seeds."""
    return _percent(bootstrap_mean(prompt_values(records)))


def difference(ours: Sequence[Result], theirs: Sequence[Result]) -> Interval:
    """Points of accuracy by which ours is better, over the same prompts."""
    return _percent(paired_difference(prompt_values(ours), prompt_values(theirs)))


def _percent(interval: Interval) -> Interval:
    return Interval(
        mean=100 * interval.mean,
        low=100 * interval.low,
        high=100 * interval.high,
        prompts=interval.prompts,
        p=interval.p,
    )
