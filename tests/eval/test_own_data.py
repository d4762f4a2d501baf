"""kvp-eval and kvp evolve on rows of a user with every metric, and what they say of bad rows."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from kvp.data.metrics import METRICS, score_answer
from kvp.manifest import read_sealed_json
from kvp.programs import evaluate as main
from kvp.programs import report, run_program
from policies.allocators.evolved import load_budgets

evolve = partial(run_program, "evolve")

CONTEXT = "The sky is blue. The grass is green. There are 7 suns. "


def jsonl(path: Path, *rows: object) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def run(folder: Path, data: Path, out: Path, **changes: object) -> int:
    arguments = {
        "model": folder, "tasks": "data", "data": data, "split": "all", "length": 200,
        "methods": "full,knorm", "budgets": "50%", "protection": "off", "timing_prompts": 0,
        "bootstrap": 5, "tokens": "false", "max_new_tokens": 5, "out": out, **changes,
    }  # fmt: skip
    return main([part for k, v in arguments.items() for part in (f"--{k}", str(v))])


def records(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / "rows.jsonl").read_text().splitlines()]


def said(capsys: pytest.CaptureFixture[str]) -> str:
    return " ".join(capsys.readouterr().err.split())


def test_every_metric(tiny_folder: Path, tmp_path: Path) -> None:
    rows: list[dict[str, object]] = [
        {"context": CONTEXT, "question": "What?", "answers": ["e 7", "s"], "metric": metric,
         "task": metric}
        for metric in (*METRICS, "none")
    ]  # fmt: skip
    for metric in ("choice", "choice_norm"):
        rows.append({"context": CONTEXT, "question": "What?", "choices": ["blue", "a"], "gold": 0,
                     "metric": metric, "task": metric})  # fmt: skip
    for row in rows:
        row["answers"] = ["7", "8"] if str(row["metric"]).startswith("num") else row.get("answers")
    out = tmp_path / "out"
    assert run(tiny_folder, jsonl(tmp_path / "my.jsonl", *rows), out) == 0
    found = records(out)
    assert {record["metric"] for record in found} == {row["metric"] for row in rows}
    assert len(found) == len(rows) * 2 * 2
    for record in found:
        assert record["task"] == record["metric"]
        if record["metric"] == "none":
            assert record["nll"] > 0
            assert record["score"] is None
        elif record["metric"] in METRICS:
            score = score_answer(record["prediction"], record["metric"], record["references"])
            assert record["score"] == score
            assert "score_norm" not in record
        else:
            assert record["prediction"] in ("blue", "a")
            assert record["score"] == float(record["prediction"] == "blue")
            assert len(record["choice_nll"]) == 2
    assert report([str(out), "--out", str(tmp_path / "report.html")]) == 0


def test_one_metric_for_all_rows(
    tiny_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    row = {"query": CONTEXT + "What?", "reply": "blue", "metric": "all"}
    data = jsonl(tmp_path / "my.jsonl", row)
    names = {"columns": "question=query,answer=reply", "answer_prefix": "It is"}
    out = tmp_path / "out"
    assert run(tiny_folder, data, out, metric="f1", **names) == 0
    (*_, record) = records(out)
    assert (record["metric"], record["references"]) == ("f1", ["blue"])
    manifest = read_sealed_json(out / "manifest.json")
    assert manifest["identity"]["metric"] == "f1"
    assert manifest["identity"]["columns"] == names["columns"]
    said(capsys)
    assert run(tiny_folder, data, out, metric="exact", **names) != 0
    assert "--out" in said(capsys)
    assert len(records(out)) == 4


def test_what_cannot_be_used_is_one_line_each(
    tiny_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    good = {"context": CONTEXT, "question": "What?", "answer": "e"}
    data = jsonl(
        tmp_path / "my.jsonl",
        good,
        {**good, "metric": "bleu"},
        {**good, "answer": None},
        {**good, "metric": "choice"},
        {**good, "metric": "number"},
        {"context": CONTEXT},
    )
    assert run(tiny_folder, data, tmp_path / "out") == 0
    message = said(capsys)
    assert "skipped 2 of 6 rows: line 2 has metric 'bleu', which is not one of all, part" in message
    assert "line 6 has none of the accepted columns (it has: context)" in message
    assert "left out 3 rows" in message
    for reason in (
        "line 3 has no answer to measure", "line 4 has no choices",
        "line 5 has an answer without a number, for metric number",
    ):  # fmt: skip
        assert reason in message
    (example,) = {record["example"] for record in records(tmp_path / "out")}
    assert example.startswith("my/all/0/0")
    jsonl(tmp_path / "none.jsonl", {**good, "answer": ""})
    assert run(tiny_folder, tmp_path / "none.jsonl", tmp_path / "none") == 2
    assert "left out 1 row: line 1 has no answer to measure" in said(capsys)
    assert not (tmp_path / "none").exists()


def test_a_search_maximises_the_metric(
    tiny_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [
        {"context": CONTEXT * 2 + f"Number {number}. ", "question": "What?",
         "choices": ["blue", "green", "here"], "gold": number % 3}
        for number in range(60)
    ]  # fmt: skip
    data = jsonl(tmp_path / "my.jsonl", *rows)
    flags = {
        "model": tiny_folder, "tasks": "data", "data": data, "length": 200, "scorer": "knorm",
        "budget": "40%", "sinks": 1, "recents": 2, "search_prompts": 4, "holdout": 0,
        "generations": 1, "group": 2, "bootstrap": 5, "split": "train", "out": tmp_path / "out",
        "metric": "choice_norm",
    }  # fmt: skip
    assert evolve([part for k, v in flags.items() for part in (f"--{k}", str(v))]) == 0
    made = load_budgets(tmp_path / "out").made_by
    assert made["uniform"]["score"] in (0, 0.25, 0.5, 0.75, 1)
    assert made["elite"]["score"] >= made["uniform"]["score"]
