"""The benchmark of future attention runs, and the forms it compares compute the same label."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest


def test_forms_agree_and_skipped_ones_are_named(
    run_benchmark: Callable[..., None], tmp_path: Path
) -> None:
    out = tmp_path / "out.json"
    quick = ["--workloads", "grid", "--forms", "naive,blocked", "--rounds", "1", "--seconds", "0"]
    # 3 matrices of 7 x 100 x 100 numbers are 0.0008 GiB, of 200 x 200 four times as much.
    limits = ["--lengths", "100,200", "--naive-gib", "0.002", "--out", str(out)]
    run_benchmark("future_attention", *quick, *limits)
    report = json.loads(out.read_text())
    assert report["machine"]["torch"]
    naive, blocked, skipped, last = report["results"]
    assert naive["sum"] == pytest.approx(blocked["sum"], rel=1e-6)
    assert 0 < blocked["fastest"] <= blocked["seconds"]
    assert 0 <= blocked["working_mib"] < blocked["peak_mib"]
    assert skipped["skipped"] == "needs about 0.0 GiB"
    assert "seconds" not in skipped
    assert last["length"] == 200


def test_one_pass_with_weights_is_compared_with_two(
    run_benchmark: Callable[..., None], tmp_path: Path
) -> None:
    out = tmp_path / "out.json"
    forms = ["--forms", "naive,definition,blocked,windows,triton"]
    quick = ["--rounds", "1", "--seconds", "0", "--lengths", "100", "--out", str(out)]
    run_benchmark("future_attention", "--workloads", "reply,cut", *forms, *quick)
    reply, cut = (json.loads(out.read_text())["results"][first : first + 5] for first in (0, 5))
    sums = [record["sum"] for record in reply[:4]]
    assert sums == pytest.approx([sums[0]] * 4, rel=1e-5)
    assert "processor_seconds" in reply[3]
    assert reply[4]["skipped"] == cut[4]["skipped"] == "needs --device cuda"
    assert cut[3]["skipped"] == "is for the workload reply"


def test_unknown_forms_are_refused(
    run_benchmark: Callable[..., None], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        run_benchmark("future_attention", "--forms", "slow", "--out", str(tmp_path / "out.json"))
    assert "no slow" in capsys.readouterr().err
