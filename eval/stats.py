"""Intervals and comparisons over prompts and policy seeds. NumPy and SciPy, seeded, no model.

One bootstrap with two crossed levels (docs/decisions.md#intervals, with its coverage):

- Prompts are reweighted within their task (Bayesian bootstrap, Rubin 1981), and every task weighs
  the same. Where the range of a value is known, half a prompt at each end of it is added (Jeffreys'
  prior), so that no interval has width 0 near 0 and 100 %; where it is not, Student's t is used.
- Questions about one context (`kvp.data.task.context_of`) are reweighted together; the mean still
  weighs every question the same.
- Policy seeds add Student's t of the means of the seeds. With one seed there is nothing to
  estimate their spread from: the interval is then about prompts alone.

All methods answer the same prompts, so differences are paired.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import special
from scipy.stats import quantile_test

from eval.records import value_of
from kvp.data.task import context_of

Floats = NDArray[np.float64]
Unit = tuple[str, str]
"""A prompt: (task, example)."""
Scores = Mapping[Hashable, Mapping[Unit, float]]
"""Policy (None of a method without) -> prompt -> value. Policies differ in their seed alone."""
Bounds = tuple[float, float]
"""Least and largest value that a prompt can have."""

LEVEL = 0.05
"""1 minus the confidence of every interval, and the error rate of a table of comparisons."""
PSEUDO_PROMPTS = 0.5
"""Prompts added at each end of the range, all tasks together."""

_Z = float(special.ndtri(1 - LEVEL / 2))


@dataclass(frozen=True, kw_only=True)
class Interval:
    """An estimate and its 95 % interval."""

    mean: float
    low: float
    high: float
    prompts: int
    """Prompts the estimate rests on."""
    p: float | None = None
    """Two-sided p-value that a difference is 0, None for means; not corrected for the number of
    comparisons (`holm`)."""


def by_policy(
    records: Iterable[Mapping[str, Any]], field: str = "score"
) -> dict[Hashable, dict[Unit, float]]:
    """A field of the records of one setting; records without the field are left out."""
    scores: dict[Hashable, dict[Unit, float]] = defaultdict(dict)
    for record in records:
        if record[field] is not None:
            scores[record["policy"]][record["task"], record["example"]] = float(record[field])
    return dict(scores)


def prompt_values(records: Iterable[Mapping[str, Any]]) -> Scores:
    """More is better: the score, or log-likelihood per token, of one setting's records."""
    return by_policy([{**record, "value": value_of(record)} for record in records], "value")


def prompts_of(scores: Scores) -> set[Unit]:
    """Prompts that some policy answered."""
    return {unit for answers in scores.values() for unit in answers}


def bootstrap_mean(
    scores: Scores, *, bounds: Bounds | None = (0, 1), resamples: int = 2000, seed: int = 0
) -> Interval:
    """Mean over tasks of the mean over prompts, policies averaged, with its interval.

    Without `bounds` an interval needs two prompts: of a single one it has width 0. Raises
    ValueError without values.
    """
    values = _over_policies(scores)
    if not values:
        raise ValueError("no prompts to average")
    generator = np.random.default_rng(seed)
    draws = _prompt_draws(values, bounds, resamples, generator)
    draws += _seed_draws(_means_of_seeds(scores, values), resamples, generator)
    return _interval(_mean(values), draws, len(values), bounds)


def paired_difference(
    ours: Scores,
    theirs: Scores,
    *,
    bounds: Bounds | None = (-1, 1),
    resamples: int = 2000,
    seed: int = 0,
) -> Interval:
    """Mean of ours minus theirs over the prompts both answered, with interval and p-value.

    Where both sides have the same policies, these are paired, too; else they are independent.
    Raises ValueError where they share no prompt.
    """
    shared = _minus(_over_policies(ours), _over_policies(theirs))
    if not shared:
        raise ValueError("the two methods share no prompt")
    generator = np.random.default_rng(seed)
    draws = _prompt_draws(shared, bounds, resamples, generator)
    sides: list[Scores] = [ours, theirs]
    if set(ours) == set(theirs):
        sides = [{policy: _minus(ours[policy], theirs[policy]) for policy in ours}]
    sides.sort(key=lambda side: _standard_error(_means_of_seeds(side, shared)))
    for side in sides[:-1]:
        draws += _seed_draws(_means_of_seeds(side, shared), resamples, generator)
    widest = _means_of_seeds(sides[-1], shared)
    if _standard_error(widest) > 0:
        p = _p_value_of_seeds(draws, widest)
        draws += _seed_draws(widest, resamples, generator)
    else:
        degrees = sum(len(sums) - 1 for sums, _ in _by_task(shared))
        p = _p_value_of_prompts(draws, degrees, stretched=bounds is None)
    return _interval(_mean(shared), draws, len(shared), bounds, p)


def perplexity(
    records: Iterable[Mapping[str, Any]], *, resamples: int = 2000, seed: int = 0
) -> Interval:
    """exp(sum of nll / sum of reply tokens) with its interval over texts (KVP, section 4.2).

    Policies are pooled. The interval is made in nats per token; of a single text it has width 0.
    Raises ValueError without records that carry an nll.
    """
    records = list(records)
    nll = by_policy(records, "nll")
    if not nll:
        raise ValueError("no replies to average")
    tokens = {
        (record["task"], record["example"]): float(record["reply_tokens"] or 0)
        for record in records
    }
    pooled = _over_policies(nll)
    losses, lengths = _by_context(pooled, list(pooled.values()), [tokens[unit] for unit in pooled])

    def nats(of: Mapping[Unit, float]) -> float:
        return sum(of.values()) / sum(tokens[unit] for unit in of)

    generator = np.random.default_rng(seed)
    weights = generator.standard_exponential((resamples, len(losses)))
    mean = nats(pooled)
    factor = _small_sample(len(losses)) * _student(len(losses) - 1)
    draws: Floats = mean + factor * ((weights @ losses) / (weights @ lengths) - mean)
    means = [nats(part) for part in _answered_by_all(nll, pooled)]
    draws += _seed_draws(means, resamples, generator)
    interval = _interval(mean, draws, len(pooled), (0, math.inf))
    return Interval(
        mean=math.exp(mean),
        low=math.exp(interval.low),
        high=math.exp(interval.high),
        prompts=len(pooled),
    )


def median_interval(values: Sequence[float]) -> Interval | None:
    """Median and its interval between order statistics; None for fewer than 6 values.

    No distribution is assumed: the number of values below the median is binomial.
    """
    if len(values) < 6:
        return None
    low, high = quantile_test(values).confidence_interval(1 - LEVEL)
    return Interval(
        mean=float(np.median(values)), low=float(low), high=float(high), prompts=len(values)
    )


def holm(differences: Sequence[Interval]) -> list[bool]:
    """Which differences are not 0, so that any wrong one among them has a chance of 5 % at most.

    Source: Holm 1979, "A simple sequentially rejective multiple test procedure".
    """
    p_values = [1.0 if gap.p is None else gap.p for gap in differences]
    kept = [False] * len(p_values)
    for rank, index in enumerate(np.argsort(p_values)):
        if p_values[index] > LEVEL / (len(p_values) - rank):
            break
        kept[index] = True
    return kept


def _over_policies(scores: Scores) -> dict[Unit, float]:
    """Mean over the policies that answered a prompt."""
    values: dict[Unit, list[float]] = defaultdict(list)
    for answers in scores.values():
        for unit, value in answers.items():
            values[unit].append(value)
    return {unit: float(np.mean(values[unit])) for unit in sorted(values)}


def _minus(ours: Mapping[Unit, float], theirs: Mapping[Unit, float]) -> dict[Unit, float]:
    return {unit: ours[unit] - theirs[unit] for unit in ours if unit in theirs}


def _mean(values: Mapping[Unit, float]) -> float:
    return float(np.mean([sums.sum() / counts.sum() for sums, counts in _by_task(values)]))


def _by_task(values: Mapping[Unit, float]) -> list[list[Floats]]:
    """Sum of values and number of prompts, each [contexts], of every task."""
    tasks: dict[str, dict[Unit, float]] = defaultdict(dict)
    for unit, value in values.items():
        tasks[unit[0]][unit] = value
    return [
        _by_context(of_task, list(of_task.values()), [1.0] * len(of_task))
        for of_task in tasks.values()
    ]


def _by_context(units: Iterable[Unit], *columns: Sequence[float]) -> list[Floats]:
    """Sums [contexts] of the values of prompts that share a context, in the order of the first."""
    numbers: dict[Unit, int] = {}
    places = [
        numbers.setdefault((task, context_of(example)), len(numbers)) for task, example in units
    ]
    return [np.bincount(places, weights=column).astype(float) for column in columns]


def _prompt_draws(
    values: Mapping[Unit, float],
    bounds: Bounds | None,
    resamples: int,
    generator: np.random.Generator,
) -> Floats:
    """Means [resamples] under random weights of the contexts, of one prompt each as a rule.

    The prompts added at the ends are divided so that tasks of few contexts, which decide the width,
    get most of them. Draws are stretched about their own mean to the variance of a mean.
    """
    tasks = _by_task(values)
    precision = sum(1 / len(sums) for sums, _ in tasks)
    degrees = sum(len(sums) - 1 for sums, _ in tasks)
    draws = np.zeros(resamples)
    for sums, counts in tasks:
        n, prompts = len(sums), float(counts.sum())
        weights = generator.standard_exponential((resamples, n))
        total, weight = weights @ sums, weights @ counts
        centre, factor = float(sums.sum() / prompts), _small_sample(n)
        if bounds is None:
            factor *= _student(degrees)
        else:
            size = prompts / n  # what is added weighs as much as contexts do
            added = PSEUDO_PROMPTS / n / precision
            ends = generator.standard_gamma(added, (resamples, 2))
            total = total + size * (ends @ np.array(bounds))
            weight = weight + size * ends.sum(1)
            centre = (float(sums.sum()) + size * added * sum(bounds)) / (prompts + 2 * size * added)
        draws += (centre + factor * (total / weight - centre)) / len(tasks)
    return draws


def _small_sample(n: int) -> float:
    """Ratio of two standard errors of a mean, the unbiased one to that under Dirichlet weights.

    With s^2 the variance with divisor n - 1: s^2 / n against (n - 1) s^2 / (n (n + 1)).
    """
    return math.sqrt((n + 1) / max(n - 1, 1))


def _student(degrees: int) -> float:
    """Quantile of Student's t as a multiple of the normal one; 1 without degrees of freedom."""
    return float(special.stdtrit(degrees, 1 - LEVEL / 2)) / _Z if degrees > 0 else 1.0


def _answered_by_all(scores: Scores, units: Mapping[Unit, float]) -> list[dict[Unit, float]]:
    """Values of every policy on the prompts that all of them answered; empty without any."""
    shared = [unit for unit in units if all(unit in answers for answers in scores.values())]
    return [{unit: answers[unit] for unit in shared} for answers in scores.values() if shared]


def _means_of_seeds(scores: Scores, units: Mapping[Unit, float]) -> list[float]:
    return [_mean(part) for part in _answered_by_all(scores, units)]


def _standard_error(means: Sequence[float]) -> float:
    return float(np.std(means, ddof=1)) / math.sqrt(len(means)) if len(means) > 1 else 0.0


def _seed_draws(means: Sequence[float], resamples: int, generator: np.random.Generator) -> Floats:
    """Deviations [resamples] of the mean over seeds; 0 for fewer than two seeds."""
    if len(means) < 2:
        return np.zeros(resamples)
    draws: Floats = generator.standard_t(len(means) - 1, resamples)
    return draws * _standard_error(means)


def _p_value_of_seeds(draws: Floats, means: Sequence[float]) -> float:
    """Two-sided, of draws [resamples] to which the deviations of seeds are still to be added.

    Their distribution is known, so that small p-values are not a matter of counting draws.
    """
    ratio, degrees = draws / _standard_error(means), len(means) - 1
    tails = [float(special.stdtr(degrees, side * ratio).mean()) for side in (-1, 1)]
    return min(1.0, 2 * min(tails))


def _p_value_of_prompts(draws: Floats, degrees: int, *, stretched: bool) -> float:
    """Two-sided, by Student's t; `stretched` draws have its quantile in their spread already."""
    if degrees < 1:
        return 1.0
    mean = abs(float(draws.mean()))
    spread = float(draws.std()) / (_student(degrees) if stretched else 1.0)
    if spread == 0:  # the same difference on every prompt
        return 0.0 if mean > 0 else 1.0
    return 2 * float(special.stdtr(degrees, -mean / spread))


def _interval(
    mean: float, draws: Floats, prompts: int, bounds: Bounds | None, p: float | None = None
) -> Interval:
    """Percentiles of the draws, within the bounds and around the mean."""
    low, high = np.quantile(draws, [LEVEL / 2, 1 - LEVEL / 2])
    least, largest = (-math.inf, math.inf) if bounds is None else bounds
    return Interval(
        mean=mean,
        low=min(mean, max(least, float(low))),
        high=max(mean, min(largest, float(high))),
        prompts=prompts,
        p=p,
    )
