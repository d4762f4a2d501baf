"""The benchmark of a training step runs, and its parts make up the step."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "ranker_training.py"
PARTS = ("forward", "loss", "backward", "clipping", "optimizer", "averaging")


def test_parts_add_up_to_the_step(tmp_path: Path) -> None:
    out = tmp_path / "found.json"
    shapes = ["--heads", "2", "--tokens", "64", "--head_dim", "8", "--contexts", "2"]
    rest = ["--hidden", "8", "--objective", "listwise", "--network", "loop", "--steps", "1"]
    call = [sys.executable, str(SCRIPT), *shapes, *rest, "--out", str(out)]
    made = subprocess.run(call, capture_output=True, text=True, check=False)
    assert made.returncode == 0, made.stderr
    report = json.loads(out.read_text())
    assert report["machine"]["torch"]
    assert report["settings"]["heads"] == 2
    (row,) = report["results"]
    assert (row["objective"], row["network"]) == ("listwise", "loop")
    assert all(row[part] >= 0 for part in PARTS)
    assert sum(row[part] for part in PARTS) == pytest.approx(row["seconds"], rel=0.5)
    assert row["paper_minutes"] == pytest.approx(row["seconds"] * 4000 / 60)
    assert row["peak_gb"] > 0
