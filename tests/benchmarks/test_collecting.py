"""The benchmark of collecting, at the smallest size that says something."""

import pytest

from benchmarks.collecting import CLOCKS


def test_ratios_are_medians_of_rounds(run_benchmark):
    sizes = ["--models", "wide", "--layers", "1", "--shortest", "6", "--longest", "20"]
    rest = ["--prompts", "3", "--max_new_tokens", "4", "--batch_size", "2", "--rounds", "1"]
    report = run_benchmark("collecting", *sizes, *rest)
    assert report["machine"]["cpu"]
    assert report["failed"] == {}
    assert [row["way"] for row in report["results"]] == ["bare", "collect", "one"]
    (bare,) = report["results"][0]["seconds"]
    for row in report["results"]:
        (spent,) = row["seconds"]
        assert row["per_second"] == pytest.approx(3 / spent["wall"], rel=1e-3)
        for clock in CLOCKS:
            assert row["over_bare"][clock] == pytest.approx(spent[clock] / bare[clock], abs=6e-4)
