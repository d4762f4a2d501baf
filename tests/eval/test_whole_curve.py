"""The area under a curve of answers, and the budget that is enough."""

from __future__ import annotations

import math

import pytest

from eval.whole_curve import areas, curve_budgets, enough

A, B = ("task", "a"), ("task", "b")


def test_budgets_of_one_kind_in_order() -> None:
    assert curve_budgets(["50%", "full", "6%", "own", "12.5%"]) == ("6%", "12.5%", "50%")
    assert curve_budgets(["64", "8", "512", "6%"]) == ("8", "64", "512")
    assert curve_budgets(["full", "own"]) == ()


def test_the_area_is_the_mean_over_the_logarithm_of_the_budget() -> None:
    curve = {
        "full": {None: {A: 9.0, B: 9.0}},
        "10%": {None: {A: 0.0, B: 1.0}},
        "20%": {None: {A: 1.0, B: 1.0}},
        "80%": {None: {A: 1.0, B: 1.0}},
    }
    found = areas(curve)
    assert found is not None
    width = math.log(8)
    assert found[None][A] == pytest.approx((math.log(2) / 2 + math.log(4)) / width)
    assert found[None][B] == pytest.approx(1)
    assert areas({"10%": {None: {A: 1.0}}}) is None
    assert areas({"10%": {None: {A: 1.0}}, "20%": {None: {B: 1.0}}}) is None


def test_enough_is_the_smallest_budget_from_which_on_all_suffice() -> None:
    means = {"6%": 0.97, "12.5%": 0.9, "25%": 0.96, "50%": 1.0}
    assert enough(means, full=1.0) == "25%"
    assert enough(means, full=0.9) == "6%"
    assert enough(means, full=2.0) is None
    assert enough({"6%": 0.0}, full=0.0) is None
