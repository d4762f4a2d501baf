"""Budgets from cost curves: greedy marginal gain on convex hulls. No model, no prompt.

Minimise the sum over units (layers or heads) of E_k / W, the share of future attention lost at k
tokens, under a total number of tokens. On the lower convex hull of every curve each further token
gains less than the one before, so taking the largest gains first is exact (Fox 1966, "Discrete
optimization via marginal analysis"). Choices for growing totals are nested.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]


def hull(budgets: Floats, cost: Floats) -> Integers:
    """Indices [K] of the points on the lower convex hull of `cost` [P] over `budgets` [P]."""
    kept: list[int] = []
    for point in range(len(budgets)):
        while len(kept) > 1 and _above(budgets, cost, kept[-2], kept[-1], point):
            kept.pop()
        kept.append(point)
    return np.array(kept)


def hull_costs(fractions: Floats, costs: Floats, tokens: int, floor: int) -> Floats:
    """Cost of every token count from `floor` to `tokens` on the hulls: [units, tokens - floor + 1].

    `costs` [units, P] are given at `fractions` [P] of `tokens`, the last of them 1, and linear in
    between. The hull begins at `floor`, below which no unit may go.
    """
    given = fractions * tokens
    corners = np.concatenate([[floor], given[given > floor]])
    counts = np.arange(floor, tokens + 1)
    result = []
    for cost in costs:
        at_corners = np.interp(corners, given, cost)
        kept = hull(corners, at_corners)
        result.append(np.interp(counts, corners[kept], at_corners[kept]))
    return np.stack(result)


def greedy_order(costs: Floats) -> Integers:
    """Units in the order in which they get one token more, largest gain first: [units * steps].

    `costs` [units, steps + 1] are convex; equal gains go round the units.
    """
    gains = np.minimum.accumulate(-np.diff(costs, axis=1), axis=1).round(12)
    units, steps = np.indices(gains.shape)
    order = np.lexsort((units.ravel(), steps.ravel(), -gains.ravel()))
    return units.ravel()[order]


def greedy_counts(order: Integers, units: int, total: int, floor: int) -> Integers:
    """Counts [units] of a total, `floor` each before the first gain."""
    taken = np.bincount(order[: total - floor * units], minlength=units)
    return taken + floor


def _above(x: Floats, y: Floats, first: int, middle: int, last: int) -> bool:
    """Whether the middle point lies on or above the line through the other two."""
    rise = (y[middle] - y[first]) * (x[last] - x[first])
    return bool(rise >= (y[last] - y[first]) * (x[middle] - x[first]))
