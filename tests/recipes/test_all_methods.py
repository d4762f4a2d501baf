"""The recipe of all methods: valid settings, and pages that hold the numbers of small results."""

from __future__ import annotations

import csv
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy.stats import spearmanr

from eval.methods import build_methods
from eval.tune.config import TuneConfig
from eval.tune.subjects import subjects_of
from kvp.artifacts.jsonl import JsonLines
from kvp.cli import parse
from kvp.config_groups import split_list
from kvp.manifest import digest_json, write_sealed_json
from train.config import TrainConfig

ROOT = Path(__file__).parents[2]
RECIPE = ROOT / "recipes" / "all_methods"
MODULES = ("blocks", "join_settings", "pages", "specs", "stories", "tasks", "witness")
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
            "tried": 32, "exhausted": False, "open_ends": [], "extended": {},
        }
        for protocol in PROTOCOLS
        for method, scorer, variant, rule in (
            ("kvp", "kvp", "auto", "global"), ("snapkv", "snapkv(kernel=31)", "kernel=31", "ada"),
        )
    ],
}  # fmt: skip

# (method, variant, allocator, protected, policy, seed, budget) -> scores of four prompts
SCORES: Mapping[tuple[Any, ...], tuple[float, ...]] = {
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
def shared() -> dict[str, str]:
    """Settings of settings.sh."""
    names = ("TUNED", "PUBLISHED", "ALLOCATED", "ALLOCATORS", "REFERENCES", "WITNESSES",
             "WITNESS_BUDGETS", "BUDGETS")  # fmt: skip
    script = f". {RECIPE}/settings.sh; " + "; ".join(f'echo "${name}"' for name in names)
    done = subprocess.run(["bash", "-c", script], check=True, capture_output=True, text=True)
    return dict(zip(names, done.stdout.splitlines(), strict=True))


def _rows(protocol: str, scores: Mapping[tuple[Any, ...], tuple[float, ...]]) -> Iterator[Any]:
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
                    "budget": kept if budget else None, "example": f"{task}{number}",
                    "score": None if forced else float(score),
                    "prediction": None if forced else "7", "nll": 20.0 - score if forced else None,
                    "reply_tokens": 10 if forced else None, "kept_tokens": kept,
                    "cached_tokens": 16, "cache_bytes": None, "prompt_digest": "0" * 16,
                    "metric": "all", "evidence_tokens": None, "evidence_kept": None,
                    "evidence_lost": None,
                }  # fmt: skip


def _results(
    folder: Path, protocol: str, scores: Mapping[tuple[Any, ...], tuple[float, ...]]
) -> Path:
    identity = {
        "model": "nano", "length": 20, "split": "test", "seed": 0, "sinks": 1, "recents": 2,
        "dtype": "float32", "max_new_tokens": 8,
    }  # fmt: skip
    folder.mkdir(parents=True)
    manifest = {
        "format": "kvp-results", "format_version": 3, "config": identity, "identity": identity,
        "identity_digest": digest_json(identity), "command": ["kvp-eval", protocol],
        "kvp": "0.1.0", "created": "2026-01-01T00:00:00+00:00", "tuned": {"settings": TUNED},
    }  # fmt: skip
    write_sealed_json(folder / "manifest.json", manifest)
    JsonLines(folder / "rows.jsonl").rewrite(_rows(protocol, scores))
    return folder


def _block(page: str, name: str) -> str:
    return page.partition(f"<!-- begin {name}")[2].partition(f"<!-- end {name}")[0]


def test_its_script_parses_and_names_its_steps() -> None:
    subprocess.run(["bash", "-n", str(RECIPE / "run.sh")], check=True)
    done = subprocess.run(
        ["bash", str(RECIPE / "run.sh"), "nothing"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert "tune [PROTOCOL]" in done.stdout


def test_a_step_runs_on_the_chosen_tasks_or_not_at_all(tmp_path: Path) -> None:
    programs = tmp_path / "bin"
    programs.mkdir()
    for name, line in (
        ("python", f'exec {sys.executable} "$@"'),
        ("kvp-collect", 'echo "collect $*"'),
        ("kvp-train", 'echo "train $*"'),
        ("kvp", 'echo "$*"'),
    ):
        (programs / name).write_text(f"#!/bin/bash\n{line}\n")
        (programs / name).chmod(0o755)
    settings = {"BIN": str(programs), "RUN": str(tmp_path / "run"), "PAGES": str(tmp_path)}
    command = ["bash", str(RECIPE / "run.sh"), "train"]
    environment = {**os.environ, **settings, "SEEDS": "3", "CONTROL_SEEDS": "4"}
    run = partial(subprocess.run, command, env=environment, capture_output=True, text=True)
    nothing = run(check=False)
    assert nothing.returncode != 0
    assert "run the step `tasks` first" in nothing.stderr
    assert nothing.stdout == ""
    table = tmp_path / "benchmarks" / "results" / "tuning" / "tasks.csv"
    table.parent.mkdir(parents=True)
    table.write_text(
        "task,prompts,full,low,high,longest_right_answer,chosen\n"
        "one,4,100.0,90.0,100.0,6,1\ntwo,4,10.0,0.0,20.0,0,0\nthree,4,90.0,80.0,95.0,3,1\n"
    )
    collected, *trained = run(check=True).stdout.splitlines()
    assert "--tasks one,three " in collected
    words = [line.split()[0] for line in trained]
    assert words == ["train", "distill", "train", "distill", "train"]
    assert ["recent" in line for line in trained] == [True, False, False, False, False]
    assert ["regress" in line for line in trained] == [False, False, False, False, True]
    for first, then in (trained[:2], trained[2:4]):
        made = first.split("--out ")[1].split()[0]
        assert f"--policy {made} " in then


def test_its_settings_are_valid(shared: dict[str, str]) -> None:
    for name in ("PUBLISHED", "WITNESSES"):
        assert build_methods(split_list(shared[name]))
    assert len(build_methods(split_list(shared["REFERENCES"]))) > 5
    tuned = [method for method in split_list(shared["TUNED"]) if method != "kvp"]
    config = TuneConfig(out="out", methods=",".join(tuned), allocators=shared["ALLOCATORS"])
    assert len(subjects_of(config)) == len(tuned)
    assert set(split_list(shared["ALLOCATED"])) <= {*tuned, "kvp"}
    path = str(ROOT / "configs" / "all_methods" / "train.yaml")
    trained = parse(
        TrainConfig, ["--config", path, "--traces", "t", "--out", "o"], prog="kvp-train"
    )
    assert trained.recipe().objective == "listwise"


def test_every_published_method_is_measured(shared: dict[str, str], recipe: dict[str, Any]) -> None:
    for anchor in recipe["witness"].anchors(RECIPE / "published.csv"):
        assert anchor.kept in split_list(shared["WITNESS_BUDGETS"])
        ours = [line["ours"] for line in anchor.lines if line["ours"]]
        assert set(ours) <= set(split_list(shared["WITNESSES"]))
        assert ours == [method.label for method in build_methods(ours)]  # as in records
        assert all(line["source"] for line in anchor.lines)


def test_blocks_are_replaced_and_the_rest_is_kept(recipe: dict[str, Any]) -> None:
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


def test_tasks_are_chosen_by_the_full_cache(recipe: dict[str, Any], tmp_path: Path) -> None:
    full = ("full", "auto", "uniform", False, None, None, None)
    tasks = recipe["tasks"]
    table = tmp_path / "tasks.csv"
    with pytest.raises(SystemExit, match="first"):
        tasks.chosen(table)
    tasks.write(tasks.measured(_results(tmp_path / "good", "query_aware", {full: (1,) * 4})), table)
    (line,) = tasks.chosen(table)
    assert (line["task"], line["full"], line["prompts"]) == ("needle", "100.0", "4")
    assert int(line["longest_right_answer"]) >= 1
    assert tasks.answer_tokens(table) == 8
    bad = tasks.measured(_results(tmp_path / "bad", "query_aware", {full: (1, 0, 0, 0)}))
    with pytest.raises(SystemExit, match="80%"):
        tasks.write(bad, table)


def test_specifications_have_the_chosen_options(recipe: dict[str, Any]) -> None:
    settings = recipe["specs"].TunedSettings.from_json(TUNED, "settings")
    make = recipe["specs"].specifications
    assert make(settings, ["snapkv", "kvp"], ["ada", "global"]) == [
        "snapkv(kernel=31)+ada", "snapkv(kernel=31)+global", "kvp+ada", "kvp+global",
    ]  # fmt: skip
    assert make(settings, ["snapkv"], []) == ["snapkv(kernel=31)"]
    assert recipe["specs"].chosen(settings, ["kvp", "snapkv"]) == [
        "kvp+global",
        "snapkv(kernel=31)+ada",
    ]
    with pytest.raises(SystemExit, match="tova"):
        make(settings, ["tova"], [])


def test_a_search_for_budgets_keeps_the_chosen_protection(recipe: dict[str, Any]) -> None:
    methods = [
        {**entry, "chosen": {**entry["chosen"], "protected": entry["method"] == "kvp"}}
        for entry in TUNED["methods"]
    ]
    settings = recipe["specs"].TunedSettings.from_json({**TUNED, "methods": methods}, "settings")
    protection = recipe["specs"].protection
    assert [protection(settings, name) for name in ("snapkv", "kvp")] == ["off", "on"]


def test_a_method_tuned_again_replaces_its_earlier_setting(
    recipe: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    join, tables = recipe["join_settings"], "protocol,method,scorer\n"
    rows = {
        "snapkv": 'query_aware,snapkv,"snapkv(window=4,kernel=31)"\n',
        "kvp": "query_aware,kvp,kvp\n",
    }
    folder, target = tmp_path / "tuned", tmp_path / "query_aware"
    folder.mkdir()

    def tune(names: list[str], allocator: str) -> None:
        methods = [
            {**entry, "chosen": {**entry["chosen"], "allocator": allocator}}
            for entry in TUNED["methods"]
            if entry["method"] in names
        ]
        settings = join.TunedSettings.from_json({**TUNED, "methods": methods}, "settings")
        join.save_settings(folder / "settings.json", settings, {"allocator": allocator})
        (folder / "settings.csv").write_text(tables + "".join(rows[name] for name in names))
        monkeypatch.setattr(sys, "argv", ["join_settings.py", str(folder), str(target)])
        join.main()

    tune(["snapkv", "kvp"], "ada")
    tune(["kvp"], "global")
    chosen = {
        each.method: each.chosen.allocator
        for each in join.load_settings(target.with_suffix(".json")).methods
    }
    assert chosen == {"snapkv": "ada", "kvp": "global"}
    assert target.with_suffix(".csv").read_text() == tables + rows["snapkv"] + rows["kvp"]
    run = json.loads(target.with_suffix(".json").read_text())["run"]
    assert run == {"allocator": "ada", "later": {"allocator": "global"}}
    earlier = join.load_settings(target.with_suffix(".json"))
    assert join.joined(earlier, earlier) == earlier
    moved = join.replace(earlier, data={**earlier.data, "model": "/elsewhere/nano"})
    here = join.replace(earlier, data={**earlier.data, "model": "/here/nano"})
    assert join.joined(here, moved) == here
    other = join.replace(earlier, data={**earlier.data, "prompts": 5})
    with pytest.raises(SystemExit, match="prompts"):
        join.joined(earlier, other)


def test_stories_get_plain_quotes_and_whole_paragraphs(recipe: dict[str, Any]) -> None:
    stories = recipe["stories"]
    plain = '"It\'s so nice - to meet you!" she said.'
    garbled = "“It’s so nice – to meet you!\u201d she said.".encode()
    text = garbled.decode("cp1252", errors="ignore")
    assert stories.repaired(text) == plain
    assert list(stories.documents("a\n\nbb\n\nccc\n\nd", 4)) == ["a\n\nbb", "ccc\n\nd"]


def test_the_coefficient_is_scipys(recipe: dict[str, Any]) -> None:
    generator = np.random.default_rng(0)
    ours, published = generator.integers(0, 5, (20, 8)) / 4, generator.integers(0, 9, 8)
    expected = [spearmanr(row, published).statistic for row in ours]
    assert recipe["witness"].spearman(ours, published) == pytest.approx(expected)
    assert recipe["witness"].spearman(np.ones((1, 8)), published) == 0


def test_the_ranking_of_nano_stands_next_to_the_published_one(
    recipe: dict[str, Any], tmp_path: Path
) -> None:
    witness = recipe["witness"]
    assert witness.blocks(tmp_path / "none", RECIPE)["methods"] is None
    with (RECIPE / "published.csv").open(newline="") as stream:
        lines = [line for line in csv.DictReader(stream) if line["ours"]]
    scores: dict[tuple[Any, ...], tuple[float, ...]] = {
        ("full", "auto", "uniform", False, None, None, None): (1,) * 40
    }
    for line in lines:
        (method,) = build_methods([line["ours"]])
        right = round(40 * float(line["score"]) / 100)
        key = (method.name, method.variant, method.allocator, False, None, None, line["kept"])
        scores[key] = (1,) * right + (0,) * (40 - right)
    folder = _results(tmp_path / "witness", "query_agnostic", scores)
    blocks = witness.blocks(folder, RECIPE)
    assert "few prompts" in blocks["coefficients"]
    for words in blocks["coefficients"].split("\n- ")[1:]:
        assert 0.9 < float(words.split("coefficient ")[1].partition("*")[0]) <= 1
    assert "| Compactor | not in kvp | – | – | 87.7 |" in blocks["methods"]
    assert "| TOVA | 75.0 (" in blocks["methods"]


def test_kept_needles_are_counted_where_the_best_method_keeps_all(recipe: dict[str, Any]) -> None:
    def record(method: str, score: float, kept: list[list[int]]) -> dict[str, Any]:
        return {
            "method": method, "variant": "auto", "allocator": "uniform", "task": "niah_single_1",
            "example": "a", "budget_spec": "50%", "score": score, "evidence_tokens": 4,
            "evidence_kept": kept,
        }  # fmt: skip

    witness = recipe["witness"]
    records = [
        record("keydiff", 0.5, [[4, 4], [2, 0]]),
        record("kvzip", 1.0, [[0, 1], [4, 0]]),
        record("knorm", 0.0, [[4, 4], [0, 4]]),
    ]
    lines = witness.evidence(records).splitlines()
    assert "in head 1.0, %" in lines[2]
    assert lines[4:7] == [
        "| `kvzip` | 100.0 | 31 | 100 |",
        "| `keydiff` | 50.0 | 62 | 50 |",
        "| `knorm` | 0.0 | 75 | 0 |",
    ]
    assert lines[-1].endswith("1.00.")
    assert "No method keeps" in witness.evidence([record("keydiff", 1.0, [[1, 2]])])
    assert "No method keeps" in witness.evidence([])


def test_pages_name_no_folder_of_the_machine(recipe: dict[str, Any]) -> None:
    text = (
        "kvp (+evolved:/a/b/benchmarks/results/tuning/e.json, x) and "
        "--out /tmp/r/test --methods 'full,tuned:/a/b/benchmarks/results/tuning/q.json'"
    )
    assert recipe["pages"].without_folders(text, Path("/tmp/r")) == (
        "kvp (+evolved:benchmarks/results/tuning/e.json, x) and "
        "--out RUN/test --methods 'full,tuned:benchmarks/results/tuning/q.json'"
    )


def test_pages_hold_the_numbers_of_the_results(tmp_path: Path) -> None:
    run, to = tmp_path / "run", tmp_path / "to"
    for name in ("docs/results/methods.md", "docs/results/nano.md"):
        (to / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, to / name)
    for protocol in PROTOCOLS:
        _results(run / f"test-{protocol}", protocol, SCORES)
    halved = {(*key[:-1], "12.5%"): each for key, each in SCORES.items() if key[-1] == "25%"}
    full = {key: each for key, each in SCORES.items() if key[0] == "full"}
    _results(run / "small-query_aware", "query_aware", {**full, **halved})
    command = [
        sys.executable, str(RECIPE / "pages.py"), str(run), "--to", str(to),
        "--published", "snapkv:kvpress,gvote:paper+self_sized", "--allocated", "kvp,snapkv",
    ]  # fmt: skip
    subprocess.run(command, check=True, capture_output=True, text=True, cwd=ROOT)
    page = (to / "docs/results/methods.md").read_text()
    answers = _block(page, "answers-query_aware")
    assert "| kvp (+global, protected) | 75.0 (" in answers
    assert "| snapkv (kernel=31, +ada, protected) | 50.0 (" in answers
    assert "kvpress" not in answers
    assert "| snapkv | +25.0 (" in _block(page, "against-query_aware")
    allocators = _block(page, "allocators-query_aware")
    assert "| kvp +global (protected) | +50.0" in allocators
    published = _block(page, "published-query_aware")
    assert "kernel=31" not in published
    assert "| snapkv (kvpress, unprotected) | 0.0 (" in published
    assert "| gvote:paper+self_sized +p | query_aware | needle | 50.0 (" in _block(page, "sizes")
    assert "| full cache | 6.69 (" in _block(page, "dialogues-query_aware")  # exp(19 / 10)
    assert "| kvp (+global, protected) | 75.0 (" in _block(page, "small-query_aware")
    enough = _block(page, "enough-query_aware")
    assert "of 12.5%, 25%, 50%, from which on 95%" in enough
    assert "| kvp | 50% |\n| snapkv | more than 50% |" in enough
    before = (ROOT / "docs/results/methods.md").read_text()
    assert _block(page, "stories") == _block(before, "stories")  # nothing of it in this run
    assert "A trial" in _block(page, "setup")
    assert "kvp-eval query_agnostic" in _block(page, "setup")
    assert "the best trained ranker, kvp (" in _block(page, "summary")
    assert str(tmp_path) not in page
    assert (to / "docs/results/methods.png").read_bytes().startswith(b"\x89PNG")
    raw = to / "benchmarks/results/methods"
    assert "(query_aware/README.md)" in (raw / "README.md").read_text()
    assert any(raw.glob("query_aware/01-accuracy*.csv"))
