"""Every table of the second real model's page has a command that can start, and its rows alone."""

import os
import re
import subprocess
from pathlib import Path

import pandas as pd
import pytest

from recipes.real_models import figure

ROOT = Path(__file__).parents[2]
RECIPE = ROOT / "recipes" / "real_models" / "tables.sh"
NUMBERS = ROOT / "benchmarks/results/qwen2.5-coder"
TRIED = {"lookups"}
"""Holds policies that were tried on the way, too."""
PAIRED = sorted(NUMBERS.parent.glob("qwen2.5-coder*/length-*-paired.csv"))
NAMES = re.findall(r"^    ([a-z][a-z0-9| -]*)\) ?", RECIPE.read_text(), flags=re.MULTILINE)


@pytest.fixture
def command(tmp_path):
    """What the recipe calls to make a table: every argument, in order."""
    for name in ("kvp-eval", "python"):
        program = tmp_path / name
        program.write_text('#!/bin/sh\n[ "$RANK" = 1 ] || printf "%s\\n" "$@"\n')
        program.chmod(0o755)
    files = {"D": "texts", "BIN": str(tmp_path), "MULTI_NEWS": "news.jsonl", "GSM8K": "gsm8k.jsonl"}

    def of(table):
        done = subprocess.run(
            ["bash", str(RECIPE), table], capture_output=True, text=True, check=False,
            env={**os.environ, **files},
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        return done.stdout.splitlines()

    return of


TABLES = sorted({name.strip() for of in NAMES for name in of.split("|")})


def _values(arguments, flag):
    """The comma separated values of a flag; commas in brackets separate none."""
    given = arguments[arguments.index(flag) + 1] if flag in arguments else ""
    return re.findall(r"(?:[^,(]|\([^)]*\))+", given)


@pytest.mark.parametrize("table", TABLES)
def test_a_table_has_no_method_or_policy_that_its_command_does_not_make(table, command):
    arguments, path = command(table), NUMBERS / f"{table}.csv"
    assert "models/qwen2.5-coder-0.5b-instruct" in arguments
    if not path.exists() or "--methods" not in arguments or table in TRIED:
        pytest.skip("made by a script, a step on the way, or has more")
    methods = {re.split(r"[+(:]", method)[0] for method in _values(arguments, "--methods")}
    if "kvp" in methods:
        methods |= {f"kvp/{policy.split('=')[0]}" for policy in _values(arguments, "--policies")}
    rows = pd.read_csv(path)["method"].unique()
    assert {method.split("+")[0] for method in rows} <= methods


def _labels(rows, policy="general"):
    """How paired.py names the settings of a table."""
    settings = rows["setting"].fillna("").str.replace(r"(, )?(un)?protected$", "", regex=True)
    allocators = settings.str.extract(r"(\+.*)$")[0].fillna("")
    options = settings.str.extract(r"^([^+]+?)(?:, \+.*)?$")[0]
    methods = rows["method"].replace("kvp", f"kvp/{policy}")
    return methods + ("(" + options + ")").fillna("") + allocators


def _check_differences(differences, lead, means):
    """What a difference and the other's mean add up to is the mean of the leading setting."""
    for budget, rows in differences.groupby("budget"):
        for row in rows.to_dict("records"):
            other = means[row["minus"], "full" if row["minus"] == "full" else budget]
            assert row["difference"] + other == pytest.approx(means[lead, budget], abs=2e-4)


@pytest.mark.parametrize("path", PAIRED, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_differences_are_those_of_the_tables_beside_them(path, command):
    rows = pd.read_csv(path.with_stem(path.stem.removesuffix("-paired")))
    rows = rows[rows["task"] == "all"]
    means = dict(
        zip(zip(_labels(rows), rows["budget"], strict=True), rows["estimate"], strict=True)
    )
    _, _, _, lead, _ = command(path.stem)
    differences = pd.read_csv(path)
    for budget, rows in differences.groupby("budget"):
        assert len(rows) == sum(at == budget for _, at in means)  # and the full cache
    _check_differences(differences, lead, means)


def test_differences_from_the_policy_trained_on_the_tasks():
    """Its study is finished: three tables of the same prompts, over the tasks of the means."""
    tables = [("seen-trained", "tasks"), ("seen-rivals", ""), ("seen-snapkv", "")]
    differences, means = pd.read_csv(NUMBERS / "seen-rivals-paired.csv"), {}
    for table, policy in tables:
        rows = pd.read_csv(NUMBERS / f"{table}.csv")
        rows = rows[~rows["task"].isin(["all", "cwe", "qa_2"])]
        rows["label"] = _labels(rows, policy)
        for key, of in rows.groupby(["label", "budget"]):
            assert len(of) == 11, (table, key)
            means.setdefault(key, of["estimate"].mean())
    _check_differences(differences, "kvp/tasks", means)


def test_more_differences_from_the_policy_trained_on_the_tasks():
    """On the prompts of one table the leading setting's mean is not beside: all sums agree."""
    rows = pd.read_csv(NUMBERS / "seen.csv")
    rows = rows[~rows["task"].isin(["all", "cwe", "qa_2", "niah_single_2"])]
    rows["label"] = _labels(rows)
    means = {key: of["estimate"].mean() for key, of in rows.groupby(["label", "budget"])}
    for budget, of in pd.read_csv(NUMBERS / "seen-paired.csv").groupby("budget"):
        others = [(label, "full" if label == "full" else budget) for label in of["minus"]]
        sums = [
            difference + means[other]
            for other, difference in zip(others, of["difference"], strict=True)
            if other in means
        ]
        assert len(sums) >= len(of) - 1
        assert sums == pytest.approx([sums[0]] * len(sums), abs=2e-4)


def test_readme_and_the_figure_show_the_same_rows(monkeypatch):
    monkeypatch.chdir(ROOT)
    results = (ROOT / "README.md").read_text(encoding="utf-8").split("\n## Results\n")[1]
    lines = [line.strip().strip("|").split("|") for line in results.split("\n\n")[1].splitlines()]
    head, _, *table = [[cell.strip() for cell in line] for line in lines]
    assert [share.split(" %")[0] for share in head[1:]] == [b.rstrip("%") for b in figure.BUDGETS]
    numbers = figure.read_numbers()
    numbers = numbers[(numbers["length"] == figure.LENGTHS[0]) & (numbers["task"] == "all")]
    assert [row[0].strip("*") for row in table] == list(figure.LINES)
    for (label, *cells), name in zip(table, figure.LINES, strict=True):
        budgets = len(figure.BUDGETS) * ["full"] if label == "full cache" else figure.BUDGETS
        shown = figure.read_line(numbers, name, "budget")["estimate"][budgets]
        assert cells == [f"{value:.0f}" for value in shown], label
