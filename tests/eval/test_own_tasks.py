"""Data rows and tasks of a user, from the command line to rows.jsonl."""

from __future__ import annotations

import json
import sys
from importlib import import_module
from pathlib import Path

import pytest

import kvp
import kvp.data.tasks as registry
from kvp.programs import evaluate as main

TASK = """
from dataclasses import dataclass, replace
from kvp.data.task import blank_sample

@dataclass(frozen=True)
class Letters:
    name: str = "letters"

    def build(self, settings, tokenizer):
        blank = blank_sample(settings, self.name, "")
        return [
            replace(blank, id=f"letters/{n}", context="The sky is blue. " * 5, question="Which?",
                    references=("x",), metric="all", max_new_tokens=3)
            for n in range(settings.count)
        ]

    def score(self, sample, answer):
        return 0.25
"""


def _run(folder: Path, out: Path, **changes: object) -> int:
    arguments = {
        "model": folder, "length": 200, "methods": "full,knorm", "budgets": "50%", "seed": 1,
        "protection": "off", "prompts": 9, "timing_prompts": 0, "bootstrap": 5, "out": out,
        "tokens": "false", **changes,
    }  # fmt: skip
    return main([part for k, v in arguments.items() for part in (f"--{k}", str(v))])


def _records(out: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in (out / "rows.jsonl").read_text().splitlines()]


def test_rows_of_a_file_are_scored(
    tiny_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [
        {"context": "The sky is blue. " * 4, "question": f"{n}?", "answer": ["e", "zzz"],
         "task": "sky", "max_new_tokens": 4}
        for n in range(2)
    ]  # fmt: skip
    data = tmp_path / "mine.csv"
    lines = [f"{r['context']},{r['question']},e,sky,4" for r in rows]
    data.write_text("context,question,answer,task,max_new_tokens\n" + "\n".join([*lines, ",q,e,,"]))
    assert _run(tiny_folder, tmp_path / "out", tasks="data", data=data, split="all") == 0
    message = " ".join(capsys.readouterr().err.split())
    assert "data: only 2 of the 9 requested prompts" in message
    assert "skipped 1 of 3 rows: line 4 has no text in context" in message
    records = _records(tmp_path / "out")
    assert len(records) == 2 * 2 * 2  # prompts, protocols, methods
    assert {record["task"] for record in records} == {"sky"}
    assert all(isinstance(record["score"], float) for record in records)


def test_a_task_of_ones_own_is_scored_by_itself(
    tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "kvp_test_letters.py").write_text(TASK)
    monkeypatch.chdir(tmp_path)
    name = "kvp_test_letters:Letters"
    assert _run(tiny_folder, tmp_path / "out", tasks=name, prompts=1) == 0
    records = _records(tmp_path / "out")
    assert {(record["task"], record["score"]) for record in records} == {("letters", 0.25)}
    assert len(records) == 4


def test_a_task_object_from_python(
    tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "kvp_test_object.py").write_text(TASK)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(registry, "TASKS", dict(registry.TASKS))
    task = import_module("kvp_test_object").Letters()
    kvp.evaluate(
        tasks=[task], model=str(tiny_folder), length=200, methods="full", prompts=1,
        timing_prompts=0, bootstrap=5, tokens=False, out=str(tmp_path / "out"),
    )  # fmt: skip
    assert {record["score"] for record in _records(tmp_path / "out")} == {0.25}


def test_answers_to_a_prompt_that_changed_are_kept_apart(
    tiny_folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    module = tmp_path / "changing.py"
    module.write_text(TASK)
    assert _run(tiny_folder, tmp_path / "out", tasks="changing:Letters", prompts=1) == 0
    before = _records(tmp_path / "out")
    assert len({record["prompt_digest"] for record in before}) == 1
    module.write_text(TASK.replace("is blue", "is as grey as ever"))
    sys.modules.pop("changing")
    assert _run(tiny_folder, tmp_path / "out", tasks="changing:Letters", prompts=2) == 2
    (line,) = (line for line in capsys.readouterr().err.splitlines() if "error" in line)
    assert "another prompt called letters/0" in line
    assert "--out" in line
    assert _records(tmp_path / "out") == before
