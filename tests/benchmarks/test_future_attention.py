"""The benchmark of future attention runs, and the forms it compares compute the same label."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "future_attention.py"


def _run(*flags: str) -> subprocess.CompletedProcess[str]:
    call = [sys.executable, str(SCRIPT), *flags]
    return subprocess.run(call, capture_output=True, text=True, check=False)


def test_forms_agree_and_what_does_not_fit_is_said(tmp_path: Path) -> None:
    quick = ["--workloads", "grid", "--forms", "naive,blocked", "--rounds", "1", "--seconds", "0"]
    out = tmp_path / "found.json"
    # 3 matrices of 7 x 100 x 100 numbers are 0.0008 GiB, of 200 x 200 four times as much.
    made = _run(*quick, "--lengths", "100,200", "--naive-gib", "0.002", "--out", str(out))
    assert made.returncode == 0, made.stderr
    report = json.loads(out.read_text())
    assert report["machine"]["torch"]
    naive, blocked, skipped, last = report["results"]
    assert naive["sum"] == pytest.approx(blocked["sum"], rel=1e-6)
    assert 0 < blocked["fastest"] <= blocked["seconds"]
    assert 0 <= blocked["working_mib"] < blocked["peak_mib"]
    assert skipped["skipped"] == "needs about 0.0 GiB"
    assert "seconds" not in skipped
    assert last["length"] == 200


def test_forms_without_their_device_are_refused(tmp_path: Path) -> None:
    made = _run("--forms", "triton", "--out", str(tmp_path / "found.json"))
    assert made.returncode == 2
    assert "--device cuda" in made.stderr
    assert _run("--forms", "slow", "--out", str(tmp_path / "found.json")).returncode == 2
