"""The training studies: settings are valid, a small study runs from traces to table and figures."""

from __future__ import annotations

import json
import runpy
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from eval.config import EvalConfig
from kvp.cli import build_parser
from trace_collect.cli import main as collect
from train.config import TrainConfig

ROOT = Path(__file__).parents[2]
RECIPE = ROOT / "recipes" / "training"
Run = Callable[..., str]
CONFIGS = ROOT / "configs" / "training"


@pytest.mark.parametrize("model", ["nano", "llama", "variants"])
def test_settings_of_training_are_valid(model: str) -> None:
    parser = build_parser(TrainConfig, prog="kvp-train", description="")
    flags = ["--config", str(CONFIGS / f"{model}.yaml"), "--traces", "t", "--out", "o"]
    settings = parser.parse_args(flags).as_dict()
    settings.pop("config")
    assert TrainConfig(**settings).recipe().steps


def test_settings_of_evaluation_are_valid() -> None:
    parser = build_parser(EvalConfig, prog="kvp-eval", description="")
    settings = parser.parse_args(["--config", str(CONFIGS / "eval.yaml"), "--out", "o"]).as_dict()
    settings.pop("config")
    assert EvalConfig(**settings).split == "test"


def test_the_script_parses() -> None:
    subprocess.run(["bash", "-n", str(RECIPE / "run.sh")], check=True)


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Iterator[Run]:
    """Standard output of a script of the recipe, which runs in this process."""
    monkeypatch.syspath_prepend(str(RECIPE))

    def call(script: str, *arguments: str | Path) -> str:
        capsys.readouterr()
        monkeypatch.setattr(sys, "argv", [script, *map(str, arguments)])
        runpy.run_path(str(RECIPE / script), run_name="__main__")
        return capsys.readouterr().out

    threads = torch.get_num_threads()
    yield call
    torch.set_num_threads(threads)
    for name in ("arms", "results"):
        sys.modules.pop(name, None)


def test_a_small_study_from_traces_to_figures(tmp_path: Path, run: Run) -> None:
    nano = tmp_path / "nano"
    flags = (
        "--tasks niah_single_1 --length 128 --max_new_tokens 8 --train 6 --validation 2 --test 2"
    )
    assert collect([*flags.split(), "--out", str(nano / "traces")]) == 0
    config = tmp_path / "tiny.yaml"
    config.write_text("hidden: 8\ncontexts: 1\nsteps: 3\npermutations: 2\ncalibration: none\n")
    study = ["--traces", nano / "traces", "--config", config, "--workers", "1"]
    out = nano / "objectives"
    run("study.py", "objectives", *study, "--out", out, "--seeds", "2", "--arms", "listwise")
    chosen = ["--chosen", out, "--elsewhere", nano / "traces", "--seeds", "1"]
    run("study.py", "inputs", *study, *chosen, "--out", nano / "inputs", "--arms", "all,key")
    tuned = [json.loads(path.read_text()) for path in out.glob("tune/listwise/*/result.json")]
    best = max(tuned, key=lambda result: result["validation_skill"])
    assert len(tuned) >= 3
    first = json.loads((out / "final/listwise/seed0/result.json").read_text())
    assert first["settings"]["lr"] == best["settings"]["lr"]
    assert len(first["skill_by_head"]) == 20
    tables = run("tables.py", tmp_path)
    assert f"| listwise | {best['settings']['lr']} |" in tables
    assert "| key |" in tables
    run("figures.py", tmp_path, tmp_path / "figures")
    assert {path.name for path in (tmp_path / "figures").iterdir()} == {
        "objectives-nano.png",
        "inputs.png",
    }
    again = run("study.py", "inputs", *study, *chosen, "--out", nano / "inputs", "--arms", "key")
    assert again == ""  # nothing is trained twice
