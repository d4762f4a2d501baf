"""The benchmark of predicted costs: ratios from rounds that were measured earlier."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from benchmarks import cost_prediction
from benchmarks.cost_prediction import PARTS

RATES = {
    "source": "of a test",
    "accelerator": False,
    "prompt_flops": 5e10,
    "decode_layer_seconds": 1e-3,
    "decode_step_seconds": 1e-3,
    "pairs": 4e8,
    "grid_pairs": 2e8,
    "ranker_flops": 5e10,
    "write_bytes": 1e8,
    "read_bytes": 2e8,
    "write_importance_bytes": 8e7,
    "read_grid_bytes": 1e8,
    "copy_bytes": 2e9,
}


def test_ratios_are_predicted_over_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    numbers = {"seconds": 10.0, "ram_bytes": 1e8, "disk_bytes": 1e7}
    rates = dict.fromkeys(PARTS, RATES) | {"train-qkv": RATES | {"ranker_flops": 5e8}}
    earlier = {"rates": rates, "measured": dict.fromkeys(PARTS, numbers)}
    rounds = tmp_path / "earlier.json"
    rounds.write_text(json.dumps({"cases": {"nano": {"rounds": [earlier]}}}))
    flags = ["--cases", "nano", "--rounds", "0", "--again", str(rounds)]
    out = tmp_path / "found.json"
    monkeypatch.setattr(sys, "argv", ["cost_prediction", *flags, "--out", str(out)])
    cost_prediction.main()
    case = json.loads(out.read_text())["cases"]["nano"]
    predicted = case["rounds"][0]["predicted"]
    assert set(predicted) == set(PARTS)
    # each by the rates that were measured right before it
    assert predicted["train-qkv"]["seconds"] > 5 * predicted["train-importance"]["seconds"]
    ratio = case["median_ratios"]["collect-qkv"]
    assert ratio["seconds"] == round(predicted["collect-qkv"]["seconds"] / 10, 3)
    assert ratio["disk_bytes"] == round(predicted["collect-qkv"]["disk_bytes"] / 1e7, 3)
