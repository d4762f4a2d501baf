"""The calibration study: its settings are valid, its script parses, its table adds up."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from eval.config import EvalConfig
from kvp.cli import parse

ROOT = Path(__file__).parents[2]
RECIPE = ROOT / "recipes" / "calibration"


def test_its_settings_are_valid() -> None:
    path = ROOT / "configs" / "calibration" / "validation.yaml"
    config = parse(EvalConfig, ["--config", str(path), "--out", "o"])
    assert config.split == "validation"
    assert config.seed != 0  # traces, which calibrations are fitted on, have seed 0


def test_its_script_parses() -> None:
    subprocess.run(["bash", "-n", str(RECIPE / "run.sh")], check=True)


def test_its_table_averages_prompts_and_orders_settings(tmp_path: Path) -> None:
    name = {"method": "kvp", "variant": "auto", "policy": "seed0"}
    settings = [
        ("uniform", False, "6%", [0.0, 0.5]),
        ("uniform", False, "25%", [1.0, 1.0]),
        ("global", True, "25%", [1.0, 0.8]),
    ]
    records = [
        {**name, "allocator": rule, "protected": protected, "budget_spec": budget, "score": score}
        for rule, protected, budget, scores in settings
        for score in scores
    ]
    records.append({"method": "full", "budget_spec": None, "score": 1.0})
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    done = subprocess.run(
        [sys.executable, str(RECIPE / "table.py"), str(tmp_path)],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    lines = done.stdout.splitlines()
    assert lines[0] == "Full cache: 100.0 % (1 prompts and protocols)."
    assert lines[-2:] == [
        "| 90.0 |  | 90.0 | kvp | auto | global | seed0 | yes |",
        "| 62.5 | 25.0 | 100.0 | kvp | auto | uniform | seed0 | no |",
    ]
