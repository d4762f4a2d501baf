"""The study of training: settings are valid, a small one runs from prompts to tables."""

import json
import shutil
import sys
from pathlib import Path

import pytest
import torch
import yaml

from eval.config import EvalConfig
from kvp.program.command_line import parse
from recipes.training import run, tables
from recipes.training.arms import Training, climb
from recipes.training.settings import Grid, load_settings
from trace_collect.config import CollectConfig
from train.config import TrainConfig

ROOT = Path(__file__).parents[2]
TINY = {
    "collect": {"tasks": "niah_single_1", "length": 128, "max_new_tokens": 8}
    | {"train": 6, "validation": 2, "test": 2},
    "train": {"hidden": 8, "contexts": 1, "steps": 3, "calibration": "none"},
    "tuning": {"seed": 9, "grids": {"lr": {"values": ["1e-3", "1e-2", "1e-1"], "first": "1e-2"}}},
    "evaluate": {"tasks": "niah_single_1", "length": 128, "prompts": 2, "allocators": "uniform"}
    | {"budgets": "70%,80%", "max_new_tokens": 4, "protection": "both"},
    "reference": "listwise",
    "seeds": 2,
    "arms": [
        {"name": "listwise", "tuned": ["lr"], "settings": {"objective": "listwise"}},
        {"name": "own", "settings": {"objective": "rloo", "permutations": 2}, "seeds": 1},
    ],
}


def arguments(flags):
    return [part for name, value in flags.items() for part in (f"--{name}", value)]


@pytest.mark.parametrize(
    "path", (ROOT / "configs" / "training").glob("*.yaml"), ids=lambda p: p.stem
)
def test_committed_settings_are_valid(path):
    settings = load_settings(path)
    parse(CollectConfig, [*arguments(settings.collect), "--out", "o"], prog="kvp collect")
    parse(EvalConfig, [*arguments(settings.evaluate), "--out", "o"], prog="kvp eval")
    for arm in settings.arms:
        flags = arm.settings if arm.complete else {**settings.train, **arm.settings}
        flags = {**flags, **{name: settings.tuning.grids[name].first for name in arm.tuned}}
        given = [*arguments(flags), "--traces", "t", "--out", "o"]
        parse(TrainConfig, given, prog="kvp train")


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"reference": "none"}, "the reference 'none' is no arm"),
        ({"colour": 1}, "'colour' is unknown"),
        ({"arms": [{"name": "a", "settings": {}, "tuned": ["lr2"]}]}, "no grid|no arm"),
        ({"arms": [{"settings": {}}]}, "name"),
        ({"evaluate": {**TINY["evaluate"], "protection": "maybe"}}, "one of on, off, both"),
        ({"evaluate": {"protection": "on"}}, "needs allocators"),
    ],
)
def test_settings_that_cannot_be_used(tmp_path, change, reason):
    path = tmp_path / "study.yaml"
    path.write_text(yaml.safe_dump({**TINY, **change}))
    with pytest.raises(SystemExit, match=reason):
        load_settings(path)


def test_a_climb_ends_where_both_neighbours_are_worse():
    scores = {"1": 0.0, "2": 3.0, "3": 2.0, "4": 1.0, "5": 9.0}
    asked = []

    def score(value):
        asked.append(value)
        return scores[value]

    assert climb(Grid(values=tuple("12345"), first="4"), score) == "5"
    assert climb(Grid(values=tuple("1234"), first="4"), score) == "2"
    assert sorted(set(asked)) == list("12345")


@pytest.fixture
def study(tmp_path):
    """Settings of a tiny study, in a folder with a page for its tables."""
    path = tmp_path / "objectives.yaml"
    path.write_text(yaml.safe_dump(TINY))
    shutil.copy(ROOT / "docs" / "results" / "training.md", tmp_path / "page.md")
    threads = torch.get_num_threads()
    yield path
    torch.set_num_threads(threads)


def call(monkeypatch, program, *given):
    monkeypatch.setattr(sys, "argv", ["program", *map(str, given)])
    program.main()  # type: ignore[attr-defined]


def test_a_small_study_from_prompts_to_tables(study, tmp_path, monkeypatch, capsys):
    folder = tmp_path / "run"
    call(monkeypatch, run, study, folder, "--arms", "listwise")
    training = Training(settings=load_settings(study), run=folder)
    tuned = [json.loads(path.read_text()) for path in folder.glob("tune/listwise/*/result.json")]
    best = max(tuned, key=lambda result: result["held_out_skill"])
    first = json.loads((training.folder("listwise", 0) / "result.json").read_text())
    assert len(tuned) == 3
    assert first["settings"]["lr"] == best["settings"]["lr"]
    assert len(first["test"]["skill_by_head"]) == len(first["validation"]["skill_by_head"])
    assert not training.finished(training.settings.arm("own"))

    (training.folder("listwise", 1) / "result.json").unlink()  # as if killed there
    before = first["processor_seconds"]
    call(monkeypatch, run, study, folder)
    again = json.loads((training.folder("listwise", 0) / "result.json").read_text())
    continued = json.loads((training.folder("listwise", 1) / "result.json").read_text())
    assert again["processor_seconds"] == before  # nothing is trained twice
    assert continued["processor_seconds"] is None  # the whole is not known

    capsys.readouterr()
    page, csv = tmp_path / "page.md", tmp_path / "csv"
    call(monkeypatch, tables, study, folder, "--page", page, "--csv", csv)
    text = page.read_text()
    assert f"| listwise | lr {best['settings']['lr']}" in text
    assert "| own | – |" in text
    assert "### Few traces" in text  # what is written by hand stays
    assert "(csv/README.md)" in text
    # Skills; answers of two splits and protocols.
    assert len(list(csv.glob("*.csv"))) == 5
    lines = (folder / "answers/test/rows.jsonl").read_text().splitlines()
    rows = [row for row in map(json.loads, lines) if row["policy"] == "own.seed0"]
    rows = [row for row in rows if row["protected"] and row["protocol"] == "query_agnostic"]
    scores = [row["score"] for row in rows if row["budget_spec"] == "70%"]
    answers = text.partition("Answers on test prompts, question not seen")[2]
    line = next(line for line in answers.splitlines() if line.startswith("| own"))
    # Columns are 70 % without and with protection, each with its difference to the reference.
    assert line.split("|")[4].startswith(f" {100 * sum(scores) / len(scores):.1f} (")
