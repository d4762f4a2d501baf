"""Greedy marginal gain: equal to brute force on small curves, hulls by hand."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eval.evolve.from_cost_curves import greedy_counts, greedy_order, hull, hull_costs


def test_hull_by_hand() -> None:
    budgets = np.array([0.0, 1, 2, 3, 4])
    assert hull(budgets, np.array([10.0, 9, 4, 3, 0])).tolist() == [0, 2, 4]
    assert hull(budgets, np.array([8.0, 4, 2, 1, 0])).tolist() == [0, 1, 2, 4]


def test_hull_costs_begin_at_the_floor() -> None:
    fractions = np.array([0, 0.5, 1])
    costs = hull_costs(fractions, np.array([[1.0, 0.2, 0.0]]), tokens=4, floor=1)
    # linear from 0.6 at 1 token to 0.2 at 2 tokens, then 0.1 and 0
    assert costs.tolist() == [pytest.approx([0.6, 0.2, 0.1, 0.0])]


@settings(max_examples=60)
@given(
    gains=st.lists(st.lists(st.integers(0, 9), min_size=4, max_size=4), min_size=2, max_size=3),
    extra=st.integers(0, 8),
)
def test_greedy_is_optimal_on_convex_costs(gains: list[list[int]], extra: int) -> None:
    costs = np.array(
        [np.concatenate([[100.0], 100 - np.cumsum(sorted(gain)[::-1])]) for gain in gains]
    )
    units, floor = len(gains), 2
    total = floor * units + min(extra, 4 * units)
    counts = greedy_counts(greedy_order(costs), units, total, floor)
    assert counts.sum() == total
    assert floor <= counts.min()
    assert counts.max() <= floor + 4
    lost = sum(cost[count - floor] for cost, count in zip(costs, counts, strict=True))
    best = min(
        sum(cost[step] for cost, step in zip(costs, steps, strict=True))
        for steps in itertools.product(range(5), repeat=units)
        if sum(steps) == total - floor * units
    )
    assert lost == best


def test_equal_curves_share_equally_and_larger_totals_contain_smaller_ones() -> None:
    costs = np.array([[1.0, 0.5, 0.25, 0.125]] * 3)
    order = greedy_order(costs)
    assert greedy_counts(order, 3, 9, 1).tolist() == [3, 3, 3]
    previous = np.zeros(3, dtype=int)
    for total in range(3, 13):
        counts = greedy_counts(order, 3, total, 1)
        assert (counts >= previous).all()
        previous = counts
