"""Settings of a training: presets, and impossible ones refused in one line."""

from dataclasses import fields

import pytest

import kvp
from kvp.errors import UsageError
from kvp.program.command_line import parse_arguments
from kvp.program.table import train as main
from train.config import TrainConfig
from train.recipe import PRESETS, Recipe


def test_settings_of_a_recipe_are_flags_but_for_what_nobody_turns():
    flags = {field.name for field in fields(TrainConfig)}
    assert {field.name for field in fields(Recipe)} - flags == {
        "architecture", "final_lr", "warmup_steps", "weight_decay", "gradient_clip",
        "advantage_clip", "ema", "uniform_points",
    }  # fmt: skip
    assert set(TrainConfig.PRESETS["paper"]) == {field.name for field in fields(Recipe)} & flags


def test_flags_override_the_preset(monkeypatch):
    argv = ["--traces=t", "--out=o", "--preset=paper", "--lr=1e-3"]
    config = parse_arguments(TrainConfig, argv)
    recipe = config.recipe()
    assert recipe.lr == 1e-3
    assert recipe.reward == "ratio"
    assert recipe.steps == 4_000
    from_python = []
    monkeypatch.setattr("train.run.run", from_python.append)
    monkeypatch.setattr(TrainConfig, "check_names", lambda _: None)
    kvp.train(traces="t", out="o", preset="paper", lr=1e-3)
    assert from_python == [config]
    with pytest.raises(UsageError, match="cannot be chosen for the paper's architecture"):
        TrainConfig(traces="t", out="o", preset="paper")


def test_the_paper_preset_states_the_papers_numbers():
    paper = PRESETS["paper"]
    assert (paper.hidden, paper.lr, paper.final_lr, paper.warmup_steps) == (256, 5e-5, 1e-6, 100)
    assert (paper.steps, paper.gradient_clip) == (4_000, 5.0)
    assert (paper.compress_prompt, paper.compress_context, paper.compress_uniform) == (0, 0, 1)


def test_short_runs_warm_up_for_at_most_a_fifth():
    assert TrainConfig(traces="t", out="o", steps=4_000).recipe().warmup == 100
    assert TrainConfig(traces="t", out="o", steps=60).recipe().warmup == 12
    assert TrainConfig(traces="t", out="o", steps=1).recipe().warmup == 0


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ("--temperature 0", "--temperature must be positive"),
        ("--objective rloo --permutations 1", "--permutations must be at least 2"),
        ("--steps 0", "--steps must be at least 1"),
        ("--activation_gb=-1", "--activation_gb must be at least 0"),
        ("--lr 0", "--lr must be positive"),
        ("--reward unheard", "--reward must be skill or ratio"),
        ("--objective rloo_batch --contexts 1 --permutations 1", "--contexts times --permutations"),
        ("--compress_prompt 0 --compress_context 0 --compress_uniform 0", "cannot all be 0"),
        ("--inputs key,query", "--inputs must be some of key,value,position,distance"),
        ("--inputs=,", "--inputs must be some of"),
        ("--preset paper --inputs key", "--inputs cannot be chosen"),
    ],
)
def test_impossible_settings_are_one_line(flags, says, capsys):
    assert main(["--traces", "t", "--out", "o", *flags.split()]) == 2
    (message,) = capsys.readouterr().err.splitlines()
    assert says in message


def test_unusual_settings_that_work():
    given = {"traces": "t", "out": "o"}
    batch = TrainConfig(**given, objective="rloo_batch", permutations=1).recipe()
    assert batch.permutations == 1
    inputs = TrainConfig(**given, inputs="position,key").recipe().input_list
    assert inputs == ("key", "position")


def test_an_empty_out_is_not_the_working_directory():
    with pytest.raises(UsageError, match="--out is missing"):
        TrainConfig(traces="t", out="")
