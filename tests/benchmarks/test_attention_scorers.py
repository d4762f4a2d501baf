"""The benchmark of attention scorers runs, and both forms compute the same scores."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest


def test_both_forms_give_the_same_scores(
    run_benchmark: Callable[..., None], tmp_path: Path
) -> None:
    out = tmp_path / "times.json"
    flags = ["--tokens", "300", "--cases", "gvote", "--repeats", "1", "--out", str(out)]
    run_benchmark("attention_scorers", *flags)
    report = json.loads(out.read_text())
    assert report["machine"]["torch"]
    copied, folded = report["results"]
    assert (copied["form"], folded["form"]) == ("copied", "folded")
    assert folded["sum"] == pytest.approx(copied["sum"], rel=1e-6)
    assert folded["milliseconds"] > 0
