"""The benchmark of attention scorers runs, and both forms compute the same scores."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "attention_scorers.py"


def test_both_forms_give_the_same_scores(tmp_path: Path) -> None:
    out = tmp_path / "times.json"
    flags = ["--tokens", "300", "--cases", "gvote", "--repeats", "1", "--out", str(out)]
    made = subprocess.run([sys.executable, str(SCRIPT), *flags], capture_output=True, check=False)
    assert made.returncode == 0, made.stderr
    report = json.loads(out.read_text())
    assert report["machine"]["torch"]
    copied, folded = report["results"]
    assert (copied["form"], folded["form"]) == ("copied", "folded")
    assert folded["sum"] == pytest.approx(copied["sum"], rel=1e-6)
    assert folded["milliseconds"] > 0
