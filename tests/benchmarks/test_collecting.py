"""The benchmark of collecting, at the smallest size that says something."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.collecting import CLOCKS, main


def _report(out: Path) -> dict[str, Any]:
    report: dict[str, Any] = json.loads(out.read_text())
    assert report["machine"]["cpu"]
    return report


def test_ratios_are_medians_of_rounds(tmp_path: Path) -> None:
    out = tmp_path / "rate.json"
    main([
        "--prompts", "3", "--shortest", "6", "--longest", "20", "--max_new_tokens", "4",
        "--batch_size", "2", "--width", "128", "--layers", "1", "--rounds", "1",
        "--out", str(out),
    ])  # fmt: skip
    report = _report(out)
    (spent,) = report["results"]["seconds"]
    assert set(spent) == {"bare", "collect", "one"}
    for way, times in spent.items():
        for clock in CLOCKS:
            expected = times[clock] / spent["bare"][clock]
            found = report["results"]["over_bare"][way][clock]
            assert found == pytest.approx(expected, abs=6e-4)
    assert report["results"]["forward_seconds"]["batch"] > 0
