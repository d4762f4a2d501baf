"""Benchmarks from the command line to rows.jsonl, with files in their published form."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kvp.programs import evaluate as main


def _run(folder: Path, out: Path, **changes: object) -> int:
    arguments = {
        "model": folder, "length": 700, "methods": "full,knorm", "budgets": "50%", "prompts": 2,
        "protection": "off", "protocols": "query_agnostic", "timing_prompts": 0, "bootstrap": 5,
        "max_new_tokens": 3, "split": "all", "out": out, "tokens": "false", **changes,
    }  # fmt: skip
    return main([part for k, v in arguments.items() for part in (f"--{k}", str(v))])


def _records(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / "rows.jsonl").read_text().splitlines()]


def _write(path: Path, *rows: object) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_a_heat_map(tiny_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    assert _run(
        tiny_folder, out, tasks="niah_heatmap,niah_heatmap_numbers", prompts=4, split="test",
        depths="0,100", lengths="350, 500",
    ) == 0  # fmt: skip
    records = _records(out)
    assert len(records) == 2 * 4 * 2
    cells = {(r["labels"]["depth"], r["labels"]["prompt_length"]) for r in records}
    assert cells == {(0, 350), (100, 350), (0, 500), (100, 500)}
    assert all(r["prompt_tokens"] <= r["labels"]["prompt_length"] for r in records)
    lines = (out / "heatmap.csv").read_text().splitlines()
    assert len(lines) == 1 + 2 * 4 * 2
    assert "scores by depth and length are in" in " ".join(capsys.readouterr().err.split())
    manifest = json.loads((out / "manifest.json").read_text())
    assert manifest["identity"]["depths"] == "0,100"


def test_questions_of_one_context(tiny_folder: Path, tmp_path: Path) -> None:
    for mode in ("scdq", "multi_turn"):
        out = tmp_path / mode
        tasks = "scbench_mf,scbench_hashhop"
        assert (
            _run(tiny_folder, out, tasks=tasks, split="test", scbench_mode=mode, length=1000) == 0
        )
        records = _records(out)
        assert len(records) == 2 * 2 * 2
        assert {record["labels"]["turn"] for record in records} == {1, 2}
        assert {record["metric"] for record in records} == {"first_number", "contains"}
        of_context = {(r["task"], r["method"], r["kept_tokens"]) for r in records}
        assert len(of_context) == 2 * 2


def test_a_folder_of_longbench(
    tiny_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    row = {"input": "Who?", "context": "The sky is blue. " * 99, "answers": ["sky"],
           "all_classes": ["sky", "sun"]}  # fmt: skip
    folder = tmp_path / "data"
    folder.mkdir()
    _write(folder / "hotpotqa.jsonl", row, {**row, "answers": []})
    _write(folder / "trec.jsonl", row)
    assert _run(tiny_folder, tmp_path / "out", tasks="longbench", data=folder) == 0
    message = " ".join(capsys.readouterr().err.split())
    assert "longbench_narrativeqa, longbench_qasper" in message
    assert f"are left out: --data {folder} has nothing for them" in message
    assert "longbench_hotpotqa: skipped 1 of 2 rows: line 2 has no answers" in message
    records = _records(tmp_path / "out")
    assert {record["task"] for record in records} == {"longbench_hotpotqa", "longbench_trec"}
    assert {record["metric"] for record in records} == {"f1", "classification"}
    assert _run(tiny_folder, tmp_path / "none", tasks="longbench", data=_write(tmp_path / "a.jsonl",
                row)) == 2  # fmt: skip
    assert "has nothing for them" in capsys.readouterr().err


def test_sessions_of_a_file_and_generated_ones(tiny_folder: Path, tmp_path: Path) -> None:
    row = {
        "question_id": "q", "question_type": "multi-session", "question": "Which?", "answer": "e",
        "question_date": "2023/06/01", "haystack_dates": ["2023/05/01"],
        "haystack_sessions": [[{"role": "user", "content": "The sky is blue."}]],
    }  # fmt: skip
    data = tmp_path / "sessions.json"
    data.write_text(json.dumps([row]))
    assert _run(tiny_folder, tmp_path / "out", tasks="longmemeval", data=data, metric="f1") == 0
    records = _records(tmp_path / "out")
    assert {(r["metric"], r["labels"]["question_type"]) for r in records} == {
        ("f1", "multi-session")
    }
    data.write_text(json.dumps([row, {**row, "question_id": "r", "question_type": "update"}]))
    chosen = {"tasks": "longmemeval", "data": data, "where": "question_type=update"}
    assert _run(tiny_folder, tmp_path / "some", **chosen) == 0
    assert {record["labels"]["question_type"] for record in _records(tmp_path / "some")} == {
        "update"
    }
    notes = json.loads((tmp_path / "some" / "manifest.json").read_text())["notes"]
    assert f"--data {data}: longmemeval: --where question_type=update takes 1 of 2 rows" in notes
    out = tmp_path / "generated"
    assert _run(tiny_folder, out, tasks="longmemeval", split="test", prompts=3, length=1000) == 0
    assert {record["metric"] for record in _records(out)} == {"all", "number"}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tasks": "vt", "depths": "5"}, "--depths is what the task niah_heatmap reads"),
        ({"tasks": "vt", "scbench_mode": "scdq"}, "--scbench_mode is what the task scbench"),
        ({"tasks": "niah_heatmap", "depths": "5,101"}, "--depths must be numbers from 0 to 100"),
        ({"tasks": "niah_heatmap", "depths": "x"}, "--depths must be numbers from 0 to 100"),
        ({"tasks": "niah_heatmap", "lengths": "0"}, "--lengths must be numbers of tokens"),
        ({"tasks": "niah_heatmap", "lengths": "1.5"}, "--lengths must be numbers of tokens"),
        ({"tasks": "scbench", "scbench_mode": "both"}, "--scbench_mode"),
        ({"tasks": "longmemeval", "metric": "judge"}, "--metric: no metric 'judge'"),
        (
            {"tasks": "longbench_trecs"},
            "unknown task 'longbench_trecs' (did you mean longbench_tre",
        ),
        ({"tasks": "longbench_qasper"}, "--tasks longbench_qasper needs --data FILE, FOLDER or a"),
        (
            {"tasks": "scbench_kv", "data": "none.jsonl", "answer_prefix": "A:"},
            "--answer_prefix is what the task data reads",
        ),
        ({"tasks": "longbench"}, "needs --data FILE, FOLDER or a hub data set"),
        ({"tasks": "scbench_kv", "data": "none.jsonl"}, "--data none.jsonl: no such file"),
    ],
)
def test_what_cannot_work_is_one_line(
    tiny_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str],
    changes: dict[str, object], message: str,
) -> None:  # fmt: skip
    assert _run(tiny_folder, tmp_path / "out", **changes) == 2
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert message in error
    assert "Traceback" not in error
