"""Intervals and comparisons over prompts. NumPy only, seeded, no model.

The unit of resampling is the prompt: every method answers the same prompts, so differences are
paired, and several policy seeds are first averaged per prompt. Tasks are strata: prompts are
resampled within their task, and every task weighs the same.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Unit = tuple[str, str]
"""A prompt: (task, example)."""


@dataclass(frozen=True, kw_only=True)
class Interval:
    """An estimate and its 95 % interval."""

    mean: float
    low: float
    high: float
    prompts: int
    """Prompts the estimate rests on."""

    @property
    def excludes_zero(self) -> bool:
        """Whether a difference is significant at 5 %, two-sided."""
        return self.low > 0 or self.high < 0


def wilson(successes: float, trials: int) -> tuple[float, float]:
    """95 % Wilson score interval of a proportion; raises ValueError without trials.

    Source: Wilson 1927, "Probable inference, the law of succession, and statistical inference".
    """
    if trials < 1:
        raise ValueError("a proportion needs at least one trial")
    z = 1.959963984540054
    share = successes / trials
    centre = share + z * z / (2 * trials)
    spread = z * np.sqrt(share * (1 - share) / trials + z * z / (4 * trials * trials))
    scale = 1 + z * z / trials
    return max(0.0, float((centre - spread) / scale)), min(1.0, float((centre + spread) / scale))


def per_prompt(records: Iterable[Mapping[str, Any]], field: str = "score") -> dict[Unit, float]:
    """Mean of a field per prompt, over policy seeds; records without the field are left out."""
    values: dict[Unit, list[float]] = defaultdict(list)
    for record in records:
        if record[field] is not None:
            values[record["task"], record["example"]].append(float(record[field]))
    return {unit: float(np.mean(list_)) for unit, list_ in values.items()}


def bootstrap_mean(
    values: Mapping[Unit, float], *, resamples: int = 2000, seed: int = 0
) -> Interval:
    """Mean over tasks of the mean over prompts, with its percentile bootstrap interval.

    Raises ValueError without values.
    """
    if not values:
        raise ValueError("no prompts to average")
    strata = _by_task(values)
    generator = np.random.default_rng(seed)
    draws = np.mean([_resampled(stratum, resamples, generator).mean(1) for stratum in strata], 0)
    mean = float(np.mean([stratum.mean() for stratum in strata]))
    return _interval(mean, draws, len(values))


def paired_difference(
    ours: Mapping[Unit, float],
    theirs: Mapping[Unit, float],
    *,
    resamples: int = 2000,
    seed: int = 0,
) -> Interval:
    """Mean of ours minus theirs over the prompts both answered, with its bootstrap interval.

    Raises ValueError where they share no prompt.
    """
    shared = {unit: ours[unit] - theirs[unit] for unit in ours if unit in theirs}
    if not shared:
        raise ValueError("the two methods share no prompt")
    return bootstrap_mean(shared, resamples=resamples, seed=seed)


def perplexity(
    records: Iterable[Mapping[str, Any]], *, resamples: int = 2000, seed: int = 0
) -> Interval:
    """exp(sum of nll / sum of reply tokens) with its interval over prompts (KVP, section 4.2).

    Policy seeds of one prompt are pooled. Raises ValueError without records that carry an nll.
    """
    nll: dict[Hashable, float] = defaultdict(float)
    tokens: dict[Hashable, float] = defaultdict(float)
    for record in records:
        if record["nll"] is not None:
            nll[record["task"], record["example"]] += record["nll"]
            tokens[record["task"], record["example"]] += record["reply_tokens"]
    if not nll:
        raise ValueError("no replies to average")
    pairs = np.array([[nll[unit], tokens[unit]] for unit in nll])
    generator = np.random.default_rng(seed)
    samples = generator.integers(len(pairs), size=(resamples, len(pairs)))
    sums = pairs[samples].sum(1)
    total = pairs.sum(0)
    return _interval(float(np.exp(total[0] / total[1])), np.exp(sums[:, 0] / sums[:, 1]), len(nll))


def _by_task(values: Mapping[Unit, float]) -> list[Floats]:
    strata: dict[str, list[float]] = defaultdict(list)
    for (task, _), value in sorted(values.items()):
        strata[task].append(value)
    return [np.array(stratum) for stratum in strata.values()]


def _resampled(values: Floats, resamples: int, generator: np.random.Generator) -> Floats:
    samples: Floats = values[generator.integers(len(values), size=(resamples, len(values)))]
    return samples


def _interval(mean: float, draws: Floats, prompts: int) -> Interval:
    low, high = np.quantile(draws, [0.025, 0.975])
    return Interval(mean=mean, low=float(low), high=float(high), prompts=prompts)
