"""The recipe of all methods: its steps call the programs in their order, its settings are valid."""

import os
import subprocess
from pathlib import Path

from eval.results.tuned_settings import load_settings
from eval.tune.config import TuneConfig
from eval.tune.search import make_spaces
from kvp.program.command_line import parse_arguments
from kvp.specification import split_list
from train.config import TrainConfig

ROOT = Path(__file__).parents[2]
RECIPE = ROOT / "recipes" / "all_methods"


def _bash(*arguments, **options):
    return subprocess.run(["bash", *arguments], capture_output=True, text=True, **options)


def test_its_script_names_its_steps():
    done = _bash(str(RECIPE / "run.sh"), "nothing", check=False)
    assert done.returncode == 2
    assert "tune [PROTOCOL]" in done.stdout


def test_steps_call_the_programs_in_their_order(tmp_path):
    programs = tmp_path / "bin"
    programs.mkdir()
    for name, said in {"kvp-collect": "collect $*", "kvp-eval": "eval $*", "kvp": "$*"}.items():
        (programs / name).write_text(f'#!/bin/bash\necho "{said}"\n')
        (programs / name).chmod(0o755)
    settings = {"BIN": str(programs), "RUN": str(tmp_path / "run"), "SETTINGS": str(tmp_path)}
    environment = {**os.environ, **settings, "SEEDS": "3", "NAMES": "one,three"}

    def lines(*step):
        done = _bash(str(RECIPE / "run.sh"), *step, env=environment, check=True)
        return done.stdout.splitlines()

    collected, *trained = lines("train")
    assert "--tasks one,three " in collected
    assert [line.split()[0] for line in trained] == ["train"] * 2
    assert ["recent" in line for line in trained] == [True, False]
    assert f"--out {tmp_path / 'run'}/policies-query_aware/seed3" in trained[0]
    tested = lines("test", "query_aware")
    assert ["chat" in line for line in tested] == [False, True] * 2
    assert ["--protection off" in line for line in tested] == [False, False, True, True]


def test_its_settings_are_valid():
    settings = _bash("-c", f'. {RECIPE}/settings.sh; echo "$TUNED"; echo "$NAMES"', check=True)
    methods, names = settings.stdout.splitlines()
    tuned = split_list(methods)
    assert len(make_spaces(TuneConfig(out="out", methods=methods))) == len(tuned)
    for protocol in ("query_aware", "query_agnostic"):
        chosen = load_settings(ROOT / "benchmarks/results/tuning" / f"{protocol}.json")
        assert {entry.method for entry in chosen.methods} == {*tuned, "kvp"}
        assert set(chosen.data["tasks"]) == set(split_list(names))
    path = str(ROOT / "configs" / "all_methods" / "train.yaml")
    flags = ["--config", path, "--traces", "t", "--out", "o"]
    trained = parse_arguments(TrainConfig, flags, prog="kvp train")
    assert trained.recipe().objective == "listwise"
