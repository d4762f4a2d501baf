"""What the best null is, and what beats it."""

from __future__ import annotations

from typing import Any

import pytest

from eval.nulls import beats, best_values, prompt_values


def _record(example: str, task: str = "a", **fields: Any) -> dict[str, Any]:
    return {"task": task, "example": example, "score": None, "nll": None, **fields}


def test_a_number_per_prompt_higher_is_better() -> None:
    records = [
        _record("1", score=0.5), _record("1", score=1.0),
        _record("2", nll=6.0, reply_tokens=3),
    ]  # fmt: skip
    assert prompt_values(records) == {("a", "1"): 0.75, ("a", "2"): -2.0}


def test_every_task_weighs_the_same() -> None:
    many = {("a", str(number)): 0.4 for number in range(9)}
    nulls = [{**many, ("b", "0"): 0.4}, {**many, ("b", "0"): 0.9}, {("a", "0"): 0.5}]
    assert best_values(nulls) is nulls[1]
    assert best_values([]) is None


@pytest.mark.parametrize(
    ("ours", "expected"), [(0.6, True), (0.5, False), (0.4, False), (None, False)]
)
def test_a_method_beats_a_null_where_the_interval_is_above_zero(
    ours: float | None, expected: bool
) -> None:
    null = {("a", str(number)): 0.5 for number in range(8)}
    mine = {} if ours is None else dict.fromkeys(null, ours)
    assert beats(mine, null, resamples=50, seed=0) is expected


def test_a_mean_above_that_chance_explains_does_not_beat() -> None:
    null = {("a", str(number)): float(number % 2) for number in range(8)}
    mine = {**null, ("a", "0"): 1.0, ("a", "1"): 0.5}
    assert not beats(mine, null, resamples=500, seed=0)
