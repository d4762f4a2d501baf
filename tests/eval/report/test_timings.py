"""Bytes and seconds against the full cache."""

from __future__ import annotations

from typing import Any

import pytest

from eval.report.costs import middle_budget, timings

Record = dict[str, Any]


def test_ratios_are_to_the_full_cache(timing: list[Record]) -> None:
    full, half = timings(timing[::-1], {None: ""})
    assert (full.budget, full.bytes_to_full, full.decode_to_full) == (None, 1.0, 1.0)
    assert (half.budget, half.bytes_to_full) == (8.0, 0.5)
    assert half.decode_to_full == pytest.approx(0.75)


def test_policies_of_one_group_are_averaged(timing: list[Record]) -> None:
    kvp = [
        {**timing[1], "method": "kvp", "policy": f"seed{n}", "evict_seconds": seconds}
        for n, seconds in enumerate((0.002, 0.004))
    ]
    (measured,) = timings(kvp, {None: "", "seed0": "", "seed1": ""})
    assert measured.evict_seconds == pytest.approx(0.003)
    assert measured.bytes_to_full is None


def test_the_middle_budget_is_timed_for_all(timing: list[Record]) -> None:
    others = [{**timing[1], "budget": budget, "budget_spec": str(budget)} for budget in (2, 4, 12)]
    measured = timings([*timing, *others], {None: ""})
    assert [part.budget for part in measured] == [None, 2, 4, 8, 12]
    assert [part.budget for part in middle_budget(measured)] == [None, 8]
