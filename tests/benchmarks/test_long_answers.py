"""The benchmark of eviction while a model answers, at the smallest size that says something."""

import json

import pytest

from benchmarks.long_answers import main
from kvp.errors import UsageError


def _rows(out):
    report = json.loads(out.read_text())
    assert report["machine"]["cpu"]
    return list(report["results"])


def test_facts_are_remembered_by_what_keeps_them(tmp_path):
    out = tmp_path / "facts.json"
    main([
        "--length", "256", "--first", "96", "--prompts", "6", "--most", "2", "--budgets", "112",
        "--tasks", "niah_single_1", "--methods", "ring,random_pinned", "--every", "32",
        "--split", "test", "--out", str(out),
    ])  # fmt: skip
    full, ring, pinned = _rows(out)
    assert full["mean"] == 100
    assert ring["mean"] == 0
    assert pinned["mean"] == 100


def test_facts_may_be_told_in_the_answer(tmp_path):
    out = tmp_path / "told.json"
    main([
        "--told", "answer", "--length", "256", "--first", "48", "--prompts", "8", "--most", "2",
        "--budgets", "96", "--tasks", "niah_single_1", "--methods", "random_pinned", "--every",
        "32", "--split", "test", "--out", str(out),
    ])  # fmt: skip
    full, pinned = _rows(out)
    assert full["tasks"]["niah_single_1"]["mean"] == 100
    assert pinned["mean"] < full["mean"]


def test_prompts_without_a_fact_in_front_are_refused(tmp_path):
    with pytest.raises(
        UsageError, match="no prompt of niah_single_1 tells its facts in the prompt"
    ):
        main([
            "--length", "256", "--first", "1", "--prompts", "1", "--tasks",
            "niah_single_1", "--out", str(tmp_path / "none.json"),
        ])  # fmt: skip
