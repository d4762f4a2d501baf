"""The recipe of all methods: valid settings, and pages that hold the numbers of small results."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from eval.config import TuneConfig
from eval.tune.run import subjects_of
from eval.tune.tuned_settings import load_settings
from kvp.artifacts.files import JsonLines
from kvp.artifacts.manifest import write_sealed_json
from kvp.program.command_line import parse
from kvp.program.names import split_list
from train.config import TrainConfig

ROOT = Path(__file__).parents[2]
RECIPE = ROOT / "recipes" / "all_methods"
MODULES = ("blocks", "pages")
PROTOCOLS = ("query_aware", "query_agnostic")
TUNED = {
    "split": "validation",
    "data": {"metric": "score", "prompts": 4, "budgets": ["25%", "50%"]},
    "methods": [
        {
            "method": method, "group": "", "requested": method, "protocol": protocol,
            "chosen": {"scorer": scorer, "variant": variant, "allocator": rule, "protected": True,
                       "score": 0.75, "interval": [0.5, 1.0]},
            "published": [{"scorer": method, "variant": "auto", "allocator": "uniform",
                           "protected": True, "score": 0.25, "interval": [0.0, 0.5]}],
            "tried": 32,
        }
        for protocol in PROTOCOLS
        for method, scorer, variant, rule in (
            ("kvp", "kvp", "auto", "global"), ("snapkv", "snapkv(kernel=31)", "kernel=31", "ada"),
        )
    ],
}  # fmt: skip

# (method, variant, allocator, protected, policy, seed, budget) -> scores of four prompts
SCORES = {
    ("full", "auto", "uniform", False, None, None, None): (1, 1, 1, 1),
    **{
        ("kvp", "auto", rule, True, f"seed{seed}", seed, budget): scores
        for seed in (0, 1)
        for rule, budget, scores in (
            ("global", "25%", (1, 1, 1, 0)), ("global", "50%", (1, 1, 1, 1)),
            ("uniform", "25%", (1, 0, 0, 0)), ("uniform", "50%", (1, 1, 0, 0)),
        )
    },
    ("snapkv", "kernel=31", "ada", True, None, None, "25%"): (1, 1, 0, 0),
    ("snapkv", "kernel=31", "ada", True, None, None, "50%"): (1, 1, 1, 0),
    ("snapkv", "kvpress", "uniform", False, None, None, "25%"): (0, 0, 0, 0),
    ("snapkv", "kvpress", "uniform", False, None, None, "50%"): (1, 0, 0, 0),
    ("ring", "auto", "uniform", True, None, None, "25%"): (0, 0, 0, 0),
    ("ring", "auto", "uniform", True, None, None, "50%"): (0, 0, 0, 1),
    ("gvote", "paper", "self_sized", True, None, None, "own"): (1, 0, 1, 0),
}  # fmt: skip


@pytest.fixture(scope="module")
def shared():
    """Settings of settings.sh."""
    names = ("TUNED", "OURS", "NAMES")
    script = f". {RECIPE}/settings.sh; " + "; ".join(f'echo "${name}"' for name in names)
    done = subprocess.run(["bash", "-c", script], check=True, capture_output=True, text=True)
    return dict(zip(names, done.stdout.splitlines(), strict=True))


def _rows(protocol, scores):
    for key, values in scores.items():
        method, variant, allocator, protected, policy, seed, budget = key
        kept = 4 if budget == "25%" else 8 if budget else 16
        for number, score in enumerate(values):
            for task in ("needle", "chat"):
                forced = task == "chat"
                yield {
                    "model": "nano", "method": method, "variant": variant, "allocator": allocator,
                    "policy": policy, "policy_seed": seed, "protected": protected,
                    "protocol": protocol, "task": task, "budget_spec": budget,
                    "budget": None if budget in (None, "own") else kept,
                    "length": 20, "example": f"{task}{number}",
                    "score": None if forced else float(score),
                    "prediction": None if forced else "7", "nll": 20.0 - score if forced else None,
                    "reply_tokens": 10 if forced else None, "kept_tokens": kept,
                    "cached_tokens": 16, "cache_bytes": None, "prompt_digest": "0" * 16,
                    "metric": "all", "evidence_tokens": None, "evidence_kept": None,
                    "evidence_lost": None,
                }  # fmt: skip


def _results(folder, protocol, scores):
    identity = {
        "model": "nano", "length": 20, "split": "test", "seed": 0, "sinks": 1, "recents": 2,
        "dtype": "float32", "max_new_tokens": 8,
    }  # fmt: skip
    folder.mkdir(parents=True)
    manifest = {
        "format": "kvp-results", "format_version": 3, "config": identity, "identity": identity,
        "command": ["kvp", "eval", protocol],
        "kvp": "0.1.0", "created": "2026-01-01T00:00:00+00:00", "tuned": {"settings": TUNED},
    }  # fmt: skip
    write_sealed_json(folder / "manifest.json", manifest)
    JsonLines(folder / "rows.jsonl").rewrite(_rows(protocol, scores))
    return folder


def _block(page, name):
    return page.partition(f"<!-- begin {name}")[2].partition(f"<!-- end {name}")[0]


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
    settings = {"BIN": str(programs), "RUN": str(tmp_path / "run"), "PAGES": str(tmp_path)}
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


def test_blocks_are_replaced_and_the_rest_is_kept(recipe):
    text = "a\n<!-- begin one: script -->\nold\n<!-- end one -->\nb\n"
    fill = recipe["blocks"].fill
    filled = fill(text, {"one": "new"})
    assert filled == "a\n<!-- begin one: script -->\nnew\n<!-- end one -->\nb\n"
    assert fill(filled, {"one": "new"}) == fill(filled, {"one": None}) == filled
    for contents in ({}, {"one": "", "two": ""}):
        with pytest.raises(ValueError, match="not in both"):
            fill(text, contents)
    with pytest.raises(ValueError, match="ended"):
        fill("<!-- begin one -->\n", {"one": ""})


def test_pages_name_no_folder_of_the_machine(recipe):
    text = (
        "kvp (+evolved:/a/b/benchmarks/results/tuning/e.json, x) and "
        "--out /tmp/r/test --methods 'full,tuned:/a/b/benchmarks/results/tuning/q.json'"
    )
    assert recipe["pages"].without_folders(text, Path("/tmp/r")) == (
        "kvp (+evolved:benchmarks/results/tuning/e.json, x) and "
        "--out RUN/test --methods 'full,tuned:benchmarks/results/tuning/q.json'"
    )


def test_pages_hold_the_numbers_of_the_results(tmp_path):
    run, to = tmp_path / "run", tmp_path / "to"
    (to / "docs/results").mkdir(parents=True)
    shutil.copy(ROOT / "docs/results/methods.md", to / "docs/results/methods.md")
    for protocol in PROTOCOLS:
        _results(run / f"test-{protocol}", protocol, SCORES)
    command = [sys.executable, str(RECIPE / "pages.py"), str(run), "--to", str(to)]
    subprocess.run(command, check=True, capture_output=True, text=True, cwd=ROOT)
    page = (to / "docs/results/methods.md").read_text()
    answers = _block(page, "answers-query_aware")
    assert "| method | 25% (4) |" in answers  # 50 % is in the CSV file alone
    assert "| kvp (+global) | 75.0 (" in answers
    assert "| snapkv (kernel=31, +ada) | 50.0 (" in answers
    assert "kvpress" not in answers
    assert "A trial" in _block(page, "setup")
    summary = _block(page, "summary")
    assert "Question seen, answers with 25% of the cache: kvp 75.0 % (" in summary
    assert "kvp minus snapkv +25.0 points (" in summary
    assert "the full cache 6.69 (" in summary  # perplexity, exp(19 / 10)
    assert str(tmp_path) not in page
    raw = to / "benchmarks/results/methods"
    assert any(raw.glob("query_aware/01-accuracy*.csv"))
