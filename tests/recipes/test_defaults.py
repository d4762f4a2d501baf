"""The choice of defaults stays on validation, tunes every arm alike, and compares with seeds."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import pytest

CHOOSE: dict[str, Any] = runpy.run_path(
    str(Path(__file__).parents[2] / "recipes" / "defaults" / "choose.py"), run_name="choose"
)


@pytest.mark.parametrize("best", [1e-3, 3e-3, 1e-2, 3e-2, 1e-1])
def test_a_rate_is_followed_to_its_best(best: float) -> None:
    rates = CHOOSE["RATES"]
    asked: list[float] = []

    def skill(rate: float) -> float:
        asked.append(rate)
        return -abs(rates.index(rate) - rates.index(best))

    assert CHOOSE["best_rate"](skill) == best
    assert len(asked) == len(set(asked))


def test_a_better_arm_is_marked_and_an_equal_one_is_not() -> None:
    records = []
    for arm, right in (("default", 20), ("key_frame_end", 20), ("objective_exact", 35)):
        for seed in range(5):
            for number in range(40):
                for rule, budget in CHOOSE["CELLS"]:
                    score = float((number * 7 + seed) % 40 < right)
                    records.append(
                        {"policy": f"{arm}.seed{seed}", "task": "t", "example": str(number),
                         "allocator": rule, "budget_spec": budget, "score": score}
                    )  # fmt: skip
    rates = {"default": 1e-2, "key_frame end": 3e-3, "objective exact": 1e-2}
    lines = CHOOSE["table"](records, rates, 500).splitlines()
    assert lines[2].startswith("| default | 0.01 | 50.0 | 50.0 |")
    assert "50.0, +0.0 (" in lines[3]
    assert "*" not in lines[3]
    assert lines[4].count("87.5, +37.5 (") == 5
    assert lines[4].count(" *") == 5


def test_a_small_choice_runs_on_validation_prompts(
    model_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    small = {
        "model": model_folder, "tasks": "niah_single_1", "length": 260, "train": 8, "seeds": 2,
        "steps": 2, "hidden": 4, "prompts": 2, "max_new_tokens": 3, "resamples": 20,
        "arms": "key_frame end", "out": tmp_path / "run",
    }  # fmt: skip
    flags = [part for name, value in small.items() for part in (f"--{name}", str(value))]
    CHOOSE["main"](flags)
    printed = capsys.readouterr().out
    assert printed.count("| key_frame end |") == 2
    rows = (tmp_path / "run" / "results" / "rows.jsonl").read_text()
    assert '"split": "validation"' in rows
    assert '"split": "test"' not in rows
    assert '"seed": 0' not in rows  # the traces', which calibrations are fitted on
