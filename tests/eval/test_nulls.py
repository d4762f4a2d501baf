"""What the best null is, and what a method has over it."""

from __future__ import annotations

from typing import Any

from eval.nulls import best_values, over_null, prompt_values


def _record(example: str, task: str = "a", **fields: Any) -> dict[str, Any]:
    return {
        "task": task, "example": example, "policy": None, "score": None, "nll": None, **fields,
    }  # fmt: skip


def test_a_number_per_policy_and_prompt_higher_is_better() -> None:
    records = [
        _record("1", score=0.5, policy="s0"), _record("1", score=1.0, policy="s1"),
        _record("2", nll=6.0, reply_tokens=3),
    ]  # fmt: skip
    assert prompt_values(records) == {
        "s0": {("a", "1"): 0.5}, "s1": {("a", "1"): 1.0}, None: {("a", "2"): -2.0},
    }  # fmt: skip


def test_every_task_weighs_the_same() -> None:
    many = {("a", str(number)): 0.4 for number in range(9)}
    nulls = [
        {None: {**many, ("b", "0"): 0.4}},
        {None: {**many, ("b", "0"): 0.9}},
        {None: {("a", "0"): 0.5}},
    ]
    assert best_values(nulls) is nulls[1]
    assert best_values([]) is None


def test_differences_to_a_null_are_paired_and_need_a_shared_prompt() -> None:
    null = {("a", str(number)): number / 99 for number in range(100)}
    mine = {unit: value + 0.1 for unit, value in null.items()}
    gap = over_null({None: mine}, {None: null}, bounds=(-1, 1), resamples=500, seed=0)
    assert gap is not None
    assert 0.07 < gap.low < 0.1 < gap.high < 0.13
    other = {None: {("b", "0"): 1.0}}
    assert over_null(other, {None: null}, bounds=None, resamples=5, seed=0) is None
