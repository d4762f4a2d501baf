"""The recipe of all methods: its steps call the programs in their order, its settings are valid."""

import os
import subprocess
from pathlib import Path

import pytest

from eval.config import TuneConfig
from eval.tune.run import subjects_of
from eval.tune.tuned_settings import load_settings
from kvp.program.command_line import parse
from kvp.program.names import split_list
from train.config import TrainConfig

ROOT = Path(__file__).parents[2]
RECIPE = ROOT / "recipes" / "all_methods"
PROTOCOLS = ("query_aware", "query_agnostic")


@pytest.fixture(scope="module")
def shared():
    """Settings of settings.sh."""
    names = ("TUNED", "OURS", "NAMES")
    script = f". {RECIPE}/settings.sh; " + "; ".join(f'echo "${name}"' for name in names)
    done = subprocess.run(["bash", "-c", script], check=True, capture_output=True, text=True)
    return dict(zip(names, done.stdout.splitlines(), strict=True))


def test_its_script_parses_and_names_its_steps():
    subprocess.run(["bash", "-n", str(RECIPE / "run.sh")], check=True)
    done = subprocess.run(
        ["bash", str(RECIPE / "run.sh"), "nothing"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert "tune [PROTOCOL]" in done.stdout


def test_steps_call_the_programs_in_their_order(tmp_path):
    programs = tmp_path / "bin"
    programs.mkdir()
    for name, line in (
        ("kvp-collect", 'echo "collect $*"'),
        ("kvp-eval", 'echo "eval $*"'),
        ("kvp", 'echo "$*"'),
    ):
        (programs / name).write_text(f"#!/bin/bash\n{line}\n")
        (programs / name).chmod(0o755)
    settings = {"BIN": str(programs), "RUN": str(tmp_path / "run"), "SETTINGS": str(tmp_path)}
    environment = {**os.environ, **settings, "SEEDS": "3", "NAMES": "one,three"}

    def lines(*step):
        command = ["bash", str(RECIPE / "run.sh"), *step]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
        return done.stdout.splitlines()

    collected, *trained = lines("train")
    assert "--tasks one,three " in collected
    assert [line.split()[0] for line in trained] == ["train"] * 2
    assert ["recent" in line for line in trained] == [True, False]
    assert f"--out {tmp_path / 'run'}/policies-query_aware/seed3" in trained[0]
    tested = lines("test", "query_aware")
    assert ["chat" in line for line in tested] == [False, True] * 2
    assert ["--protection off" in line for line in tested] == [False, False, True, True]


def test_its_settings_are_valid(shared):
    tuned = split_list(shared["TUNED"])
    assert len(subjects_of(TuneConfig(out="out", methods=shared["TUNED"]))) == len(tuned)
    for protocol in PROTOCOLS:
        chosen = load_settings(ROOT / "benchmarks/results/tuning" / f"{protocol}.json")
        assert {entry.method for entry in chosen.methods} == {*tuned, "kvp"}
        assert set(chosen.data["tasks"]) == set(split_list(shared["NAMES"]))
    path = str(ROOT / "configs" / "all_methods" / "train.yaml")
    trained = parse(
        TrainConfig, ["--config", path, "--traces", "t", "--out", "o"], prog="kvp train"
    )
    assert trained.recipe().objective == "listwise"
