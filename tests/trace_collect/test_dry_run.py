"""`kvp-collect --dry-run`: what a collection would take, without one."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

Collect = Callable[..., int]


def test_a_dry_run_needs_only_a_configuration(
    run: Collect, model_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "bare").mkdir()
    shutil.copy(model_folder / "config.json", tmp_path / "bare")
    assert run("--dry-run", "--model", str(tmp_path / "bare")) == 0
    output = capsys.readouterr().out
    assert f"at most {5 * 304 * 512 / 1000:.1f} kB" in output
    assert "no times, which are measured on the model itself: --model" in output
    assert not (tmp_path / "out").exists()


def test_a_dry_run_collects_a_few_sequences_elsewhere(
    run: Collect, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("--dry-run") == 0
    output = capsys.readouterr().out
    assert re.search(r"^5 sequences of [\d.e-]+ s: \d+ s \(processor time\)", output, re.M)
    assert not (tmp_path / "out").exists()
    assert run("--dry-run", "--device=cuda:3") == 0
    assert "no times, which are measured on the model itself: --device" in capsys.readouterr().out
