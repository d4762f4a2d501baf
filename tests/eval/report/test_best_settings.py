"""Which setting stands for a method, and who is the best baseline."""

from __future__ import annotations

from typing import Any

import pytest

from eval.report.aggregates import score_grid
from eval.report.best_settings import best_baselines, choose, contests, outstanding
from eval.results.records import policy_groups

Row = dict[str, Any]
FREE = {"random", "knorm"}


def _grid(answers: list[Row]) -> Any:
    rows = [row for row in answers if row["protocol"] == "query_aware"]
    return score_grid(rows, policy_groups(rows), resamples=50)


def test_one_setting_serves_the_whole_curve(answers: list[Row]) -> None:
    grid = _grid(answers)
    choice = choose(grid, higher_is_better=True)["knorm"]
    # protected: 25 % and 100 %; unprotected: 37.5 % and 50 %
    assert choice.setting.protected
    assert (choice.settings, choice.label) == (2, "knorm (protected, best of 2)")
    assert not choose(grid, higher_is_better=False)["knorm"].setting.protected


def test_allocators_are_settings_and_own_sizes_are_methods_apart(answers: list[Row]) -> None:
    knorm = [row for row in answers if row["method"] == "knorm" and row["protected"]]
    ada = [{**row, "allocator": "ada", "score": 1.0} for row in knorm]
    own = [
        {**row, "allocator": "own", "budget_spec": "own", "budget": None, "kept_tokens": 6.4}
        for row in knorm if row["budget_spec"] == "25%"
    ]  # fmt: skip
    grid = _grid([*answers, *ada, *own])
    choices = choose(grid, higher_is_better=True)
    assert choices["knorm"].label == "knorm (+ada, protected, best of 3)"
    alone = choices["knorm+own"]
    assert (alone.label, alone.setting.own) == ("knorm+own (protected)", True)
    cell = grid[alone.setting]["own"]
    assert (cell.kept_tokens, cell.share) == (6.4, 0.4)
    shown = outstanding(grid, choices, 5, higher_is_better=True)
    assert {"full", "oracle", "kvp", "knorm+own"} < set(shown)
    assert len(shown) == 5
    assert "random" not in shown  # the worst of the others
    assert set(outstanding(grid, choices, 99, higher_is_better=True)) == set(choices)


def test_only_shared_budgets_decide(answers: list[Row]) -> None:
    kept = [
        row for row in answers
        if not (row["method"] == "knorm" and row["protected"] and row["budget_spec"] == "50%")
    ]  # fmt: skip
    assert not choose(_grid(kept), higher_is_better=True)["knorm"].setting.protected


def test_validation_decides_where_it_is_given(answers: list[Row]) -> None:
    grid = _grid(answers)
    swapped = [
        {**row, "protected": not row["protected"]} if row["method"] == "knorm" else row
        for row in answers
    ]
    choice = choose(grid, higher_is_better=True, validation=_grid(swapped))["knorm"]
    assert not choice.setting.protected
    assert choice.label == "knorm (unprotected, chosen on validation)"


def test_best_baseline_reads_no_attention_and_is_not_learned(answers: list[Row]) -> None:
    grid = _grid(answers)
    choices = choose(grid, higher_is_better=True)
    for spec in ("25%", "50%"):
        assert best_baselines(grid, choices, spec, FREE | {"kvp", "full"}) == ["knorm"]
    assert best_baselines(grid, choices, "25%", FREE, higher_is_better=False) == ["random"]
    assert best_baselines(grid, choices, "25%", set()) == []


def test_contests_are_paired(answers: list[Row]) -> None:
    grid = _grid(answers)
    choices = choose(grid, higher_is_better=True)
    (small,) = contests(grid, choices, "25%", FREE, resamples=50)
    # per prompt 1 - 1, 0.5 - 0, 0.5 - 0, 1 - 0
    assert small.difference.mean == pytest.approx(0.5)
    assert (small.family, small.baseline, small.both_reach_full) == ("kvp", "knorm", False)
    (large,) = contests(grid, choices, "50%", FREE, resamples=50)
    assert (large.difference.mean, large.both_reach_full) == (0.0, True)
    assert not large.difference.excludes_zero
