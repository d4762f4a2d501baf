"""Bytes and seconds against the full cache."""

from __future__ import annotations

from typing import Any

import pytest

from eval.report.costs import middle_budget, timings
from eval.report.tables import costs_of_requests

Record = dict[str, Any]
SIX = range(6)


def test_ratios_are_to_the_full_cache(timing: list[Record]) -> None:
    full, half = timings(timing[::-1], {None: ""})
    assert (full.budget, full.bytes_to_full) == (None, 1.0)
    assert (half.budget, half.bytes_to_full) == (8.0, 0.5)
    assert full.decode_to_full is not None
    assert half.decode_to_full is not None
    assert full.decode_to_full.mean == 1.0
    assert half.decode_to_full.mean == pytest.approx(0.75)
    # prompt by prompt, so the prompts' own differences leave the ratio alone
    assert half.decode_to_full.low == pytest.approx(half.decode_to_full.high)


def test_policies_of_one_group_are_averaged(timing: list[Record]) -> None:
    kvp = [
        {
            **timing[1], "method": "kvp", "policy": f"seed{n}",
            "by_prompt": {**timing[1]["by_prompt"], "evict_seconds": [seconds * k for k in SIX]},
        }
        for n, seconds in enumerate((0.002, 0.004))
    ]  # fmt: skip
    (found,) = timings(kvp, {None: "", "seed0": "", "seed1": ""})
    assert found.evict is not None
    assert found.evict.mean == pytest.approx(0.003 * 2.5)
    assert (found.evict.low, found.evict.high) == (0.0, pytest.approx(0.015))
    assert found.bytes_to_full is None


def test_the_middle_budget_is_timed_for_all(timing: list[Record]) -> None:
    others = [{**timing[1], "budget": budget, "budget_spec": str(budget)} for budget in (2, 4, 12)]
    found = timings([*timing, *others], {None: ""})
    assert [part.budget for part in found] == [None, 2, 4, 8, 12]
    assert [part.budget for part in middle_budget(found)] == [None, 8]


def test_seconds_of_few_prompts_are_left_out(timing: list[Record]) -> None:
    fewer = [
        {**record, "by_prompt": {name: times[:5] for name, times in record["by_prompt"].items()}}
        for record in timing
    ]
    none = [{**record, "by_prompt": {}} for record in timing]
    for records in (fewer, none):
        found = timings(records, {None: ""})
        assert {(part.prefill, part.evict, part.decode) for part in found} == {(None, None, None)}
        assert [part.cache_bytes for part in found] == [1024, 512]
        table = costs_of_requests(found)
        assert "left out where fewer than 6 prompts were timed" in table.caption
        assert [str(getattr(cell, "text", cell)) for cell in table.rows[1]][4:] == ["–"] * 4
