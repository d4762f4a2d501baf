from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from eval.stats import (
    bootstrap_mean,
    paired_difference,
    per_prompt,
    perplexity,
    wilson,
)


def _record(task: str, example: str, **fields: Any) -> dict[str, Any]:
    return {"task": task, "example": example, "score": None, "nll": None, **fields}


def test_wilson_matches_a_published_example() -> None:
    # Newcombe 1998, table I: 81 of 263 -> 0.2553 to 0.3662 (score method without correction)
    low, high = wilson(81, 263)
    assert (round(low, 4), round(high, 4)) == (0.2553, 0.3662)


def test_wilson_stays_inside_zero_and_one() -> None:
    low, high = wilson(0, 10)
    assert low == 0.0
    assert high == pytest.approx(0.2775, abs=5e-5)  # z^2 / (n + z^2)
    assert wilson(10, 10)[1] == pytest.approx(1.0)
    with pytest.raises(ValueError, match="trial"):
        wilson(0, 0)


def test_policy_seeds_are_averaged_per_prompt() -> None:
    records = [
        _record("a", "1", score=1.0), _record("a", "1", score=0.0), _record("a", "2", score=1.0),
        _record("a", "3"),
    ]  # fmt: skip
    assert per_prompt(records) == {("a", "1"): 0.5, ("a", "2"): 1.0}


def test_tasks_weigh_the_same_whatever_their_number_of_prompts() -> None:
    values = {("a", "1"): 1.0, ("b", "1"): 0.0, ("b", "2"): 0.0, ("b", "3"): 0.0}
    interval = bootstrap_mean(values, resamples=50)
    assert (interval.mean, interval.low, interval.high, interval.prompts) == (0.5, 0.5, 0.5, 4)
    with pytest.raises(ValueError, match="no prompts"):
        bootstrap_mean({})


def test_bootstrap_interval_is_the_binomial_one() -> None:
    values = {("a", str(i)): float(i < 30) for i in range(100)}
    interval = bootstrap_mean(values, resamples=20_000, seed=1)
    spread = 1.96 * math.sqrt(0.3 * 0.7 / 100)
    assert interval.mean == pytest.approx(0.3)
    assert interval.low == pytest.approx(0.3 - spread, abs=0.015)
    assert interval.high == pytest.approx(0.3 + spread, abs=0.015)
    assert bootstrap_mean(values, seed=5) == bootstrap_mean(values, seed=5)


def test_pairing_makes_a_constant_difference_certain() -> None:
    generator = np.random.default_rng(0)
    theirs = {("a", str(i)): float(x) for i, x in enumerate(generator.random(30))}
    ours = {unit: value + 0.125 for unit, value in theirs.items()}
    ours["b", "only ours"] = 9.0
    difference = paired_difference(ours, theirs, resamples=200)
    assert difference.prompts == 30
    assert difference.mean == pytest.approx(0.125)
    assert difference.low == pytest.approx(0.125)
    assert difference.excludes_zero
    assert not paired_difference(theirs, theirs).excludes_zero
    with pytest.raises(ValueError, match="share no prompt"):
        paired_difference({("a", "x"): 1.0}, theirs)


def test_perplexity_pools_tokens_of_all_replies() -> None:
    records = [
        _record("chat", "1", nll=2.0, reply_tokens=4),
        _record("chat", "2", nll=6.0, reply_tokens=4),
        _record("chat", "3"),
    ]
    result = perplexity(records, resamples=500)
    assert result.mean == pytest.approx(math.e)  # exp(8 / 8)
    assert result.low == pytest.approx(math.exp(0.5))
    assert result.high == pytest.approx(math.exp(1.5))
    assert result.prompts == 2
    with pytest.raises(ValueError, match="no replies"):
        perplexity(records[2:])
