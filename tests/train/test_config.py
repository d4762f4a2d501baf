"""Settings of a training: presets, and what is refused in one line."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

import pytest
import yaml

from kvp.command_line import parse
from kvp.programs import train as main
from train.config import TrainConfig
from train.recipe import PRESETS, Recipe

CONFIGS = sorted((Path(__file__).parents[2] / "configs").glob("train_*.yaml"))


def test_settings_of_a_recipe_are_flags_but_for_what_nobody_turns() -> None:
    flags = {field.name for field in fields(TrainConfig)}
    assert {field.name for field in fields(Recipe)} - flags == {
        "architecture", "final_lr", "warmup_steps", "weight_decay", "gradient_clip",
        "advantage_clip", "ema",
    }  # fmt: skip
    assert set(TrainConfig.PRESETS["paper"]) == {field.name for field in fields(Recipe)} & flags


def test_settings_that_the_objective_does_not_read_are_known() -> None:
    listwise = TrainConfig(traces="t", out="o", reward="ratio", temperature=1.0, permutations=4)
    assert listwise.unread() == ["permutations", "reward", "temperature"]
    given = TrainConfig(traces="t", out="o", objective="rloo", reward="ratio", permutations=4)
    assert given.unread() == []


def test_flags_override_the_preset() -> None:
    recipe = TrainConfig(traces="t", out="o", preset="paper", lr=1e-3).recipe()
    assert recipe.lr == 1e-3
    assert recipe.reward == "ratio"
    assert recipe.steps == 4_000


def test_the_paper_preset_states_the_papers_numbers() -> None:
    paper = PRESETS["paper"]
    assert (paper.hidden, paper.lr, paper.final_lr, paper.warmup_steps) == (256, 5e-5, 1e-6, 100)
    assert (paper.steps, paper.gradient_clip) == (4_000, 5.0)
    assert (paper.compress_prompt, paper.compress_context, paper.compress_uniform) == (
        0.0,
        0.0,
        1.0,
    )
    assert not paper.exclude_protected


def test_short_runs_warm_up_for_at_most_a_fifth() -> None:
    assert TrainConfig(traces="t", out="o", steps=4_000).recipe().warmup == 100
    assert TrainConfig(traces="t", out="o", steps=60).recipe().warmup == 12
    assert TrainConfig(traces="t", out="o", steps=1).recipe().warmup == 0


@pytest.mark.parametrize(
    ("flag", "value"),
    [
        ("steps", "0"),
        ("contexts", "0"),
        ("permutations", "0"),
        ("lr", "0"),
        ("hidden", "0"),
        ("min_prefix", "0"),
        ("checkpoint_every", "0"),
        ("memory_gb", "0"),
        ("activation_gb", "0"),
    ],
)
def test_impossible_settings_name_their_flag(
    flag: str, value: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--traces", "t", "--out", "o", f"--{flag}", value]) == 2
    message = capsys.readouterr().err
    assert f"--{flag}" in message
    assert message.count("\n") == 1


def test_one_ranking_has_no_baseline(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--objective", "rloo_batch", "--contexts", "1", "--permutations", "1"]
    assert main(["--traces", "t", "--out", "o", *flags]) == 2
    assert "--contexts" in capsys.readouterr().err


def test_some_compression_point_must_be_possible(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--compress_prompt", "0", "--compress_context", "0", "--compress_uniform", "0"]
    assert main(["--traces", "t", "--out", "o", *flags]) == 2
    assert "--compress_uniform" in capsys.readouterr().err


def test_a_mistyped_yaml_key_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "train.yaml"
    path.write_text("traces: t\nout: o\nstepz: 5\n")
    assert main(["--config", str(path)]) == 2
    assert "stepz" in capsys.readouterr().err


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_shipped_configs_parse(path: Path) -> None:
    source = yaml.safe_load(path.read_text()).get("source", "traces")
    traces = ["--traces", "t"] if source == "traces" else []
    config = parse(TrainConfig, ["--config", str(path), "--out", "o", *traces], prog="kvp-train")
    assert config.source == source


def test_there_are_shipped_configs() -> None:
    assert CONFIGS


def test_by_default_rankers_read_recent_queries_where_traces_hold_them() -> None:
    recipe = TrainConfig(traces="t", out="o").recipe()
    assert not recipe.needs_queries
    assert recipe.for_traces(queries=True).inputs == "key,value,position,distance,recent"
    assert recipe.for_traces(queries=False).inputs == "key,value,position,distance"
    named = TrainConfig(traces="t", out="o", inputs="key,recent").recipe()
    assert named.needs_queries
    assert named.for_traces(queries=True) == named


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ("--temperature 0", "--temperature must be positive"),
        ("--temperature -1", "--temperature must be positive"),
        ("--objective rloo --permutations 1", "--permutations must be at least 2"),
        ("--objective rloo_batch --permutations 0", "--permutations must be at least 1"),
        ("--sequences -1", "--sequences must be at least 0"),
        ("--blocks 3", "--blocks must be 1 or 2"),
        ("--inputs key,query", "--inputs must be auto or some of key,value,position,distance"),
        ("--inputs=,", "--inputs must be auto or some of"),
        ("--preset paper --inputs key", "--inputs cannot be chosen"),
    ],
)
def test_impossible_settings(flags: str, says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--traces", "t", "--out", "o", *flags.split()]) == 2
    message = capsys.readouterr().err
    assert says in message
    assert message.count("\n") == 1


@pytest.mark.parametrize("flag", ["sort_loss", "reward"])
def test_unknown_names(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--traces", "t", "--out", "o", f"--{flag}", "unheard"]) == 2
    assert f"--{flag} must be" in capsys.readouterr().err


@pytest.mark.parametrize(("flag", "meant"), [("objective", "listwise"), ("label", "kvzip")])
def test_unknown_components_are_refused_with_a_guess(
    flag: str, meant: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--traces", "t", "--out", "o", f"--{flag}", f"{meant}e"]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"kvp-train: error: --{flag} '{meant}e' is unknown (did you mean")
    assert meant in error
    assert error.count("\n") == 1


def test_settings_that_can_work() -> None:
    given = {"traces": "t", "out": "o"}
    batch = TrainConfig(**given, objective="rloo_batch", permutations=1).recipe()
    assert batch.permutations == 1
    inputs = TrainConfig(**given, inputs="position,key").recipe().input_list
    assert inputs == ("key", "position")
