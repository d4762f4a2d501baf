"""Budget weights: how they are read, and rank coefficients against sums over the budgets."""

from __future__ import annotations

import numpy as np
import pytest

from kvp.budgets import Budget, BudgetWeights, parse_budget_weights
from kvp.errors import UsageError
from kvp.reward import rank_coefficients


@pytest.mark.parametrize("text", ["all", "log"])
def test_names(text: str) -> None:
    assert parse_budget_weights(text) == BudgetWeights(kind=text)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("text", "cached", "window"),
    [
        ("64:512", 4_000, (64, 512)),
        ("6%:50%", 1_000, (60, 500)),
        ("12.5%:12.5%", 508, (64, 64)),  # 63.5 rounds up, as everywhere
        ("16:50%", 100, (16, 50)),
    ],
)
def test_windows(text: str, cached: int, window: tuple[int, int]) -> None:
    assert parse_budget_weights(text).window(cached) == window


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("some", "all, log nor LOW:HIGH"),
        ("", "all, log nor LOW:HIGH"),
        ("512:64", "ends before it begins"),
        ("50%:6%", "ends before it begins"),
        ("0:64", "at least 1"),
        ("6%:200%", "percentage"),
        ("a:b", "'a' is neither"),
        ("1:2:3", "'2:3' is neither"),
        (":64", "neither"),
    ],
)
def test_bad_windows_are_one_line_errors(text: str, says: str) -> None:
    with pytest.raises(UsageError, match=says) as error:
        parse_budget_weights(text)
    assert "\n" not in str(error.value)


def beta(weights: BudgetWeights, budget: int, cached: int) -> float:
    """Weight of one budget, from the words of the definition."""
    if weights.kind == "log":
        return 1 / budget
    if weights.kind == "all":
        return 1.0
    assert weights.low is not None
    assert weights.high is not None
    return float(weights.low.tokens(cached) <= budget <= weights.high.tokens(cached))


@pytest.mark.parametrize("protected", [0, 20])
@pytest.mark.parametrize(
    "text", ["all", "log", "10:30", "1:1000", "30:40", "1:15", "200:300", "20%:60%", "5%:5%"]
)
def test_weighted_cost_is_the_weighted_sum_over_budgets(text: str, protected: int) -> None:
    weights, tokens = parse_budget_weights(text), 57
    cached = protected + tokens
    ranked = np.random.default_rng(0).exponential(size=tokens)  # w in the order of a ranking
    # A budget b keeps the protected tokens and the first b - protected of the others. Up to
    # b = protected nothing of the ranking is kept, whatever it is: those budgets are left out.
    lost = sum(
        beta(weights, budget, cached) * ranked[budget - protected :].sum()
        for budget in range(protected + 1, cached)
    )
    result = rank_coefficients(weights, tokens, protected=protected).numpy()
    assert (result * ranked).sum() == pytest.approx(lost, rel=1e-12, abs=1e-12)
    assert result[0] == 0
    assert (np.diff(result) >= 0).all()


def test_closed_forms() -> None:
    rank = np.arange(1, 58)
    every = rank_coefficients(BudgetWeights(), 57)
    np.testing.assert_array_equal(every, rank - 1)
    harmonic = [sum(1 / budget for budget in range(1, r)) for r in rank]
    np.testing.assert_allclose(rank_coefficients(BudgetWeights(kind="log"), 57), harmonic)
    window = BudgetWeights(kind="window", low=Budget(count=10), high=Budget(count=30))
    clamped = np.clip(np.minimum(rank - 1, 30) - 10 + 1, 0, None)
    np.testing.assert_array_equal(rank_coefficients(window, 57), clamped)


def test_protected_tokens_shift_equal_weights_by_nothing() -> None:
    every = rank_coefficients(BudgetWeights(), 9)
    np.testing.assert_array_equal(rank_coefficients(BudgetWeights(), 9, protected=20), every)
    # Weights 1/b are flatter where budgets are larger.
    shifted = rank_coefficients(BudgetWeights(kind="log"), 3, protected=20)
    np.testing.assert_allclose(shifted, [0, 1 / 21, 1 / 21 + 1 / 22])


def test_a_single_token_costs_nothing() -> None:
    for text in ("all", "log", "1:5"):
        assert rank_coefficients(parse_budget_weights(text), 1).tolist() == [0]
