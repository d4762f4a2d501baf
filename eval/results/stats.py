"""Intervals and comparisons over prompts and policy seeds. NumPy and SciPy, seeded, no model.

One bootstrap with two crossed levels (docs/decisions.md#intervals, with its coverage):

- Prompts are reweighted within their task (Bayesian bootstrap, Rubin 1981), and every task weighs
  the same. Where the range of a value is known, half a prompt at each end of it is added (Jeffreys'
  prior), so that no interval has width 0 near 0 and 100 %; where it is not, Student's t is used.
- Questions about one context (`kvp.data.task.context_key`) are reweighted together; the mean still
  weighs every question the same.
- Policy seeds add Student's t of the means of the seeds. With one seed there is nothing to
  estimate their spread from: the interval is then over prompts alone.

All methods answer the same prompts, so differences are paired.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray
from scipy import special
from scipy.stats import quantile_test

from eval.results.records import value_of
from kvp.data.task import context_key

Floats = NDArray[np.float64]
Name = TypeVar("Name", bound=Hashable)
Unit = tuple[str, str]
"""A prompt: (task, example)."""
Scores = Mapping[Hashable, Mapping[Unit, float]]
"""Policy (None for other methods) -> prompt -> value. Policies differ in their seed alone."""
Bounds = tuple[float, float]
"""Least and largest value that a prompt can have."""

LEVEL = 0.05
"""1 minus the confidence of every interval, and the error rate of a table of comparisons."""
CONFIDENCE = f"{100 * (1 - LEVEL):g} %"
RESAMPLES = 2000
PSEUDO_PROMPTS = 0.5
"""Prompts added at each end of the range, all tasks together."""
MIN_PROMPTS = 10
"""With fewer shared prompts a difference gets no verdict; nor with fewer than two per task."""
RESOLUTION = 0.05
"""The difference that the recommended numbers of prompts resolve: 5 points, or nats per token."""

_Z = float(special.ndtri(1 - LEVEL / 2))


@dataclass(frozen=True, kw_only=True)
class Interval:
    """An estimate and its 95 % interval."""

    mean: float
    low: float
    high: float
    prompts: int
    p: float | None = None
    """Two-sided p-value of a difference, None for means; without the correction of `holm`."""
    min_prompts: int = MIN_PROMPTS
    """With fewer shared prompts this difference gets no verdict."""

    @property
    def numbers(self) -> tuple[float, float, float]:
        """Estimate and ends of its interval."""
        return self.mean, self.low, self.high

    def texts(self, scale: float, form: str) -> tuple[str, str, str]:
        """`numbers` times `scale`, each in a format such as `.1f`."""
        mean, low, high = (format(scale * number, form) for number in self.numbers)
        return mean, low, high

    def __neg__(self) -> Interval:
        return replace(self, mean=0.0 - self.mean, low=0.0 - self.high, high=0.0 - self.low)


def prompt_values(records: Iterable[Mapping[str, Any]]) -> Scores:
    """Score or log-likelihood per token of each record, by policy and prompt; more is better."""
    values: dict[Hashable, dict[Unit, float]] = defaultdict(dict)
    for record in records:
        values[record["policy"]][record["task"], record["example"]] = value_of(record)
    return dict(values)


def reply_tokens(records: Iterable[Mapping[str, Any]]) -> dict[Unit, float] | None:
    """Tokens of the given replies by prompt, the weights of their likelihoods; None for answers."""
    given = (record for record in records if record["nll"] is not None)
    tokens = {(row["task"], row["example"]): float(row["reply_tokens"] or 0) for row in given}
    return tokens or None


def bootstrap_mean(
    scores: Scores, *, bounds: Bounds | None = (0, 1), weights: Mapping[Unit, float] | None = None
) -> Interval:
    """Mean over tasks of the mean over prompts, policies averaged, with its interval.

    With `weights`, tokens of replies, prompts of all tasks are pooled by them instead, and have no
    `bounds`; of a single prompt the interval then has width 0. Raises ValueError without values.
    """
    bounds = bounds if weights is None else None
    values = _over_policies(scores)
    if not values:
        raise ValueError("no prompts to average")
    generator = np.random.default_rng(0)
    draws = _prompt_draws(_by_task(values, weights), bounds, generator)
    draws += _seed_draws(_means_of_seeds(scores, values, weights), generator)
    return _interval(_mean(values, weights), draws, len(values), bounds)


def paired_difference(
    ours: Scores, theirs: Scores, *, weights: Mapping[Unit, float] | None = None, seed: int = 0
) -> Interval:
    """Mean of ours minus theirs over the prompts both answered, with interval and p-value.

    With `weights` as in `bootstrap_mean`, of log-likelihoods per token: then it is the logarithm
    of a ratio of perplexities. Where both sides have the same policies, these are paired, too; else
    they are independent. The interval reaches to 0 where the test does not reject it. Raises
    ValueError where they share no prompt.
    """
    shared = _minus(_over_policies(ours), _over_policies(theirs))
    if not shared:
        raise ValueError("the two methods share no prompt")
    if _mean(shared, weights) < 0:  # the same draws for both orders, so that pages agree
        return -paired_difference(theirs, ours, weights=weights, seed=seed)
    generator, bounds = np.random.default_rng(seed), (-1, 1) if weights is None else None
    draws = _prompt_draws(_by_task(shared, weights), bounds, generator)
    sides: list[Scores] = [ours, theirs]
    if set(ours) == set(theirs):
        sides = [{policy: _minus(ours[policy], theirs[policy]) for policy in ours}]
    *others, widest = sorted(
        (_means_of_seeds(side, shared, weights) for side in sides), key=_standard_error
    )
    for means in others:
        draws += _seed_draws(means, generator)
    if _standard_error(widest) > 0:
        p = _p_value_of_seeds(draws, widest)
        draws += _seed_draws(widest, generator)
    else:
        degrees = sum(len(sums) - 1 for sums, _ in _by_task(shared, weights))
        p = _p_value_of_prompts(draws, degrees, stretched=bounds is None)
    gap = _interval(_mean(shared, weights), draws, len(shared), bounds, p)
    gap = replace(gap, min_prompts=max(MIN_PROMPTS, 2 * len({task for task, _ in shared})))
    return gap if p <= LEVEL else replace(gap, low=min(gap.low, 0), high=max(gap.high, 0))


def prompts_to_resolve(difference: Interval) -> int:
    """Prompts of all tasks with which a difference of `RESOLUTION` would be seen.

    The half width of the interval shrinks to `RESOLUTION` with the root of the number of prompts.
    The observed variance is not used: it is 0 where all prompts agree.
    """
    half = (difference.high - difference.low) / 2
    return max(1, math.ceil(difference.prompts * (half / RESOLUTION) ** 2))


def find_smallest_budget(differences: Mapping[str, Interval]) -> tuple[str | None, str | None]:
    """The smallest budget that loses at most `RESOLUTION`, and the next one that may do so, too.

    `differences` to the full cache are by budget, the largest first. They are tested in this order,
    and the first that may lose more ends the test: with a chance of `LEVEL` at most the result is
    too small. The first is None where no budget holds, the second where the next one loses more, or
    ten times the prompts would not decide it. Source: fixed-sequence testing as in
    Angelopoulos et al. 2021, "Learn then Test" (arXiv 2110.01052), here with the interval of
    `paired_difference` in place of a bound of finite samples, which needs hundreds of prompts.
    """
    smallest = None
    for budget, gap in differences.items():
        if gap.low < -RESOLUTION:
            tells = gap.mean > -RESOLUTION and prompts_to_hold(gap) <= 10 * gap.prompts
            return smallest, budget if tells else None
        smallest = budget
    return smallest, None


def prompts_to_hold(difference: Interval) -> int:
    """Prompts with which the interval would stay above minus `RESOLUTION`."""
    ratio = (difference.mean - difference.low) / (difference.mean + RESOLUTION)
    return math.ceil(difference.prompts * ratio**2)


def perplexity(records: Iterable[Mapping[str, Any]]) -> Interval:
    """exp(sum of nll / sum of reply tokens) with its interval over texts (KVP, section 4.2).

    Policies are pooled. The interval is made in nats per token; of a single text it has width 0.
    Raises ValueError without records that carry an nll.
    """
    records = [record for record in records if record["nll"] is not None]
    if not records:
        raise ValueError("no replies to average")
    nats = bootstrap_mean(prompt_values(records), weights=reply_tokens(records))
    return Interval(
        mean=math.exp(-nats.mean),
        low=max(1.0, math.exp(-nats.high)),
        high=math.exp(min(-nats.low, 700)),  # of few texts it may have no end
        prompts=nats.prompts,
    )


def median_interval(values: Sequence[float]) -> Interval | None:
    """Median and its interval between order statistics (binomial); None for fewer than 6 values."""
    if len(values) < 6:
        return None
    low, high = quantile_test(values).confidence_interval(1 - LEVEL)
    return Interval(
        mean=float(np.median(values)), low=float(low), high=float(high), prompts=len(values)
    )


def excludes_zero(difference: Interval) -> bool:
    """Whether 0 lies outside an interval: significant, if it is the only comparison."""
    return difference.low > 0 or difference.high < 0


def holm(differences: Mapping[Name, Interval], comparisons: int | None = None) -> set[Name]:
    """Keys of the significant differences; a wrong one has a chance of 5 % at most.

    `comparisons` is the number of differences that the test corrects for, where it is more than
    are given: the best method was picked from further pairs. A difference whose interval has 0 in
    it, or with fewer prompts than `min_prompts`, is not significant. Source: Holm 1979, "A simple
    sequentially rejective multiple test procedure".
    """
    p_values = [
        1.0 if gap.p is None or not excludes_zero(gap) or gap.prompts < gap.min_prompts else gap.p
        for gap in differences.values()
    ]
    names, significant = list(differences), set[Name]()
    for rank, index in enumerate(np.argsort(p_values)):
        if p_values[index] > LEVEL / ((comparisons or len(p_values)) - rank):
            break
        significant.add(names[index])
    return significant


def _over_policies(scores: Scores) -> dict[Unit, float]:
    values: dict[Unit, list[float]] = defaultdict(list)
    for answers in scores.values():
        for unit, value in answers.items():
            values[unit].append(value)
    return {unit: float(np.mean(values[unit])) for unit in sorted(values)}


def _minus(ours: Mapping[Unit, float], theirs: Mapping[Unit, float]) -> dict[Unit, float]:
    return {unit: ours[unit] - theirs[unit] for unit in ours if unit in theirs}


def _mean(values: Mapping[Unit, float], weights: Mapping[Unit, float] | None = None) -> float:
    means = [sums.sum() / counts.sum() for sums, counts in _by_task(values, weights)]
    return float(np.mean(means))


def _by_task(
    values: Mapping[Unit, float], weights: Mapping[Unit, float] | None = None
) -> list[list[Floats]]:
    """Sum of values and number of prompts, [contexts], by task; with weights all tasks as one."""
    tasks: dict[str, dict[Unit, float]] = defaultdict(dict)
    for unit, value in values.items():
        tasks[unit[0] if weights is None else ""][unit] = value
    pairs = []
    for of_task in tasks.values():
        counts = [1.0 if weights is None else weights[unit] for unit in of_task]
        sums = [value * count for value, count in zip(of_task.values(), counts, strict=True)]
        numbers: dict[Unit, int] = {}  # of contexts, which prompts share
        places = [
            numbers.setdefault((task, context_key(example)), len(numbers))
            for task, example in of_task
        ]
        pairs.append([np.bincount(places, weights=term).astype(float) for term in (sums, counts)])
    return pairs


def _prompt_draws(
    tasks: Sequence[Sequence[Floats]], bounds: Bounds | None, generator: np.random.Generator
) -> Floats:
    """Means [`RESAMPLES`] under random weights of the contexts, of one prompt each as a rule.

    `tasks` are those of `_by_task`. The prompts added at the ends are divided so that tasks of few
    contexts, which decide the width, get most. Draws are stretched to the variance of a mean.
    """
    precision = sum(1 / len(sums) for sums, _ in tasks)
    degrees = sum(len(sums) - 1 for sums, _ in tasks)
    draws = np.zeros(RESAMPLES)
    for sums, counts in tasks:
        n, prompts = len(sums), float(counts.sum())
        weights = generator.standard_exponential((RESAMPLES, n))
        total, weight = weights @ sums, weights @ counts
        # Ratio of the standard errors, s^2 / n unbiased to (n - 1) s^2 / (n (n + 1)) as drawn.
        centre, factor = float(sums.sum() / prompts), math.sqrt((n + 1) / max(n - 1, 1))
        if bounds is None:
            factor *= _student(degrees)
        else:
            size = prompts / n  # what is added weighs as much as contexts do
            added = PSEUDO_PROMPTS / n / precision
            ends = generator.standard_gamma(added, (RESAMPLES, 2))
            total = total + size * (ends @ np.array(bounds))
            weight = weight + size * ends.sum(1)
            centre = (float(sums.sum()) + size * added * sum(bounds)) / (prompts + 2 * size * added)
        draws += (centre + factor * (total / weight - centre)) / len(tasks)
    return draws


def _student(degrees: int) -> float:
    """Quantile of Student's t as a multiple of the normal one; 1 without degrees of freedom."""
    return float(special.stdtrit(degrees, 1 - LEVEL / 2)) / _Z if degrees > 0 else 1.0


def _means_of_seeds(
    scores: Scores, units: Mapping[Unit, float], weights: Mapping[Unit, float] | None = None
) -> list[float]:
    """Mean of every policy over the prompts that all of them answered; empty without any."""
    shared = [unit for unit in units if all(unit in answers for answers in scores.values())]
    parts = ({unit: answers[unit] for unit in shared} for answers in scores.values() if shared)
    return [_mean(part, weights) for part in parts]


def _standard_error(means: Sequence[float]) -> float:
    return float(np.std(means, ddof=1)) / math.sqrt(len(means)) if len(means) > 1 else 0.0


def _seed_draws(means: Sequence[float], generator: np.random.Generator) -> Floats:
    """Deviations [`RESAMPLES`] of the mean over seeds; 0 for fewer than two seeds."""
    if len(means) < 2:
        return np.zeros(RESAMPLES)
    draws: Floats = generator.standard_t(len(means) - 1, RESAMPLES)
    return draws * _standard_error(means)


def _p_value_of_seeds(draws: Floats, means: Sequence[float]) -> float:
    """Two-sided, of draws [`RESAMPLES`] without the deviations of seeds, which are Student's t."""
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
