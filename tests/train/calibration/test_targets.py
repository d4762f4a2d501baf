"""Calibration to every target, of a policy of either preset."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from kvp.programs import run_program
from kvp.programs import train as main
from train.calibration.fit import TARGET_LABELS
from train.recipe import PresetName

calibrate = partial(run_program, "calibrate")
TINY = "--contexts=2 --hidden=16 --permutations=4 --min_prefix=40 --lr=0.01 --steps=12"
REPLIES = ((20, 33), (66, 73), (80, 92))
"""Tokens of the assistant: a reply within the context and one across its end, and the answer."""


@pytest.mark.parametrize(
    ("preset", "target"), [("fourier", "reply_contribution"), ("paper", "contribution")]
)
def test_a_policy_calibrates_to_every_target(
    make_store: Callable[..., Path],
    tmp_path: Path,
    preset: PresetName,
    target: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    store = make_store(replies=REPLIES)
    flags = [f"--traces={store}", f"--out={tmp_path / 'p'}", f"--preset={preset}"]
    assert main([*flags, *TINY.split(), "--max_positions=128"]) == 0
    policy = json.loads((tmp_path / "p" / "policy.json").read_text())
    assert policy["calibration"]["target"] == target
    capsys.readouterr()
    for other in TARGET_LABELS:
        given = [f"--policy={tmp_path / 'p'}", f"--traces={store}", f"--calibration={other}"]
        assert calibrate(given) == 0
        assert f"calibrated to {other}" in capsys.readouterr().out
