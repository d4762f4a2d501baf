"""One number for a method at all budgets: the area under its curve, and the budget that is enough.

Pure functions of values per budget. Budgets are written as a share of the cache (`12.5%`) or in
tokens; those of one curve in one way.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence

import numpy as np

from eval.results.records import FULL, SELF_SIZED
from eval.stats import Scores, Unit

ENOUGH = 0.95
"""Of the full cache's answers, that is enough."""


def curve_budgets(specs: Sequence[str]) -> tuple[str, ...]:
    """The budgets that a curve can be drawn through, smallest first.

    Of shares and token numbers, those that there are more of; not the full cache, nor one that a
    method sized itself.
    """
    shares = [spec for spec in specs if spec.endswith("%")]
    tokens = [spec for spec in specs if not spec.endswith("%") and spec not in (FULL, SELF_SIZED)]
    return tuple(sorted(shares if len(shares) >= len(tokens) else tokens, key=size_of))


def size_of(spec: str) -> float:
    """Percent or tokens of a budget."""
    return float(spec.removesuffix("%"))


def areas(by_budget: Mapping[str, Scores]) -> Scores | None:
    """Area under the curve of every policy and prompt, in the unit of the values.

    The trapezoid rule on the logarithm of the budget, divided by its width: the mean of the curve.
    Prompts that were not answered at every budget are left out. None for fewer than two budgets.
    """
    specs = curve_budgets(list(by_budget))
    if len(specs) < 2:
        return None
    places = np.log([size_of(spec) for spec in specs])
    result: dict[Hashable, dict[Unit, float]] = {}
    for policy in by_budget[specs[0]]:
        curves = [by_budget[spec].get(policy, {}) for spec in specs]
        units = [unit for unit in curves[0] if all(unit in curve for curve in curves)]
        if units:
            heights = [[curve[unit] for unit in units] for curve in curves]
            found = np.trapezoid(heights, places, axis=0) / (places[-1] - places[0])
            result[policy] = dict(zip(units, found.tolist(), strict=True))
    return result or None


def enough(means: Mapping[str, float], full: float) -> str | None:
    """The smallest budget from which on means are `ENOUGH` of the full cache's; None for none.

    None, too, where the full cache answers nothing.
    """
    least = None
    if full <= 0:
        return None
    for spec in reversed(curve_budgets(list(means))):
        if means[spec] < ENOUGH * full:
            break
        least = spec
    return least
