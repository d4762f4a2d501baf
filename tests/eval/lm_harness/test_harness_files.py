"""The harness's own tasks on local files: same prompts, any form of the rows."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from lm_eval.tasks import TaskManager

from eval.lm_harness.local_files import hub_row, rouge_l, write_tasks
from kvp.errors import UsageError

BOOLQ = {"passage": "Ice is cold.", "question": "is ice cold", "label": 1}
ARC = {
    "question": "What is ice?",
    "choices": {"text": ["water", "fire"], "label": ["A", "B"]},
    "answerKey": "A",
}
HELLASWAG = {
    "activity_label": "Skiing",
    "ctx_a": "A man skis [title] down.",
    "ctx_b": "he",
    "endings": ["falls.", "flies."],
    "label": "0",
}
MMLU = {"question": " Where is the heart? ", "choices": ["chest", "foot", "arm", "leg"],
        "answer": 0}  # fmt: skip


def _write(path: Path, rows: Sequence[object]) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def _task(folder: Path, name: str, num_fewshot: int = 0) -> Any:
    tasks = TaskManager(include_path=str(folder), include_defaults=False).load([name])["tasks"]
    task = tasks[name]
    task.set_config("num_fewshot", num_fewshot)
    task.set_fewshot_seed(1)
    task.build_all_requests(limit=1)
    return task


@pytest.mark.parametrize(
    ("name", "row", "prompt", "targets"),
    [
        ("boolq", BOOLQ, "Ice is cold.\nQuestion: is ice cold?\nAnswer:", [" no", " yes"]),
        ("arc_challenge", ARC, "Question: What is ice?\nAnswer:", [" water", " fire"]),
        ("hellaswag", HELLASWAG, "Skiing: A man skis. down. He", [" falls.", " flies."]),
        (
            "mmlu_anatomy",
            MMLU,
            "The following are multiple choice questions (with answers) about anatomy.\n\n"
            "Where is the heart?\nA. chest\nB. foot\nC. arm\nD. leg\nAnswer:",
            [" A", " B", " C", " D"],
        ),
    ],
)
def test_prompts_of_multiple_choice(
    tmp_path: Path, name: str, row: Any, prompt: str, targets: list[str]
) -> None:
    file = _write(tmp_path / "rows.jsonl", [row])
    assert write_tasks({name: file}, tmp_path, num_fewshot=0) == [name]
    task = _task(tmp_path, name)
    assert [each.args for each in task.instances] == [(prompt, target) for target in targets]


def test_examples_come_from_the_training_split(tmp_path: Path) -> None:
    rows = [{"question": f"{n} + 1?", "answer": f"{n + 1}\n#### {n + 1}"} for n in range(9)]
    data = tmp_path / "gsm8k"
    _write(data / "test.jsonl", rows[:1])
    with pytest.raises(UsageError, match="5 examples of each prompt come from the split 'train'"):
        write_tasks({"gsm8k": str(data)}, tmp_path)
    _write(data / "train.jsonl", rows[1:])
    write_tasks({"gsm8k": str(data)}, tmp_path)
    (request,) = _task(tmp_path, "gsm8k", num_fewshot=5).instances
    prompt, settings = request.args
    assert prompt.count("Question: ") == 6
    assert prompt.endswith("\n\nQuestion: 0 + 1?\nAnswer:")
    assert "Question: 0 + 1?\nAnswer: 1" not in prompt
    assert settings["until"] == ["Question:", "</s>", "<|im_end|>"]


def test_a_group_finds_the_files_of_its_tasks(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = tmp_path / "mmlu"
    for subject in ("anatomy", "virology"):
        for split in ("test", "dev"):
            path = data / split / f"{subject}_{split}.csv"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(f"question,A,B,C,D,answer\n{subject} {split}?,a,b,c,d,B\n")
    tasks = write_tasks({"mmlu": str(data)}, tmp_path)
    assert tasks == ["mmlu_anatomy", "mmlu_virology"]
    assert "no file for 55 tasks" in capsys.readouterr().err
    task = _task(tmp_path, "mmlu_virology", num_fewshot=1)
    prompt, _ = task.instances[0].args
    assert "virology dev?\nA. a\nB. b\nC. c\nD. d\nAnswer: B\n\nvirology test?\nA. a" in prompt


def test_a_summary_is_scored_by_rouge_without_further_packages(tmp_path: Path) -> None:
    row = {"context": "The cat sat on a mat.", "input": "", "answers": ["the cat sat"]}
    file = _write(tmp_path / "rows.jsonl", [row])
    write_tasks({"longbench_gov_report": file}, tmp_path)
    task = _task(tmp_path, "longbench_gov_report")
    (request,) = task.instances
    assert request.args[0].startswith("You are given a report by a government agency.")
    assert "Report:\nThe cat sat on a mat.\n\nNow, write" in request.args[0]
    scores = task.process_results(row, ["the cat ran"])
    assert scores["score"] == pytest.approx(2 / 3)


def test_rouge_takes_the_best_reference() -> None:
    doc = {"answers": ["a b c d", "x y"]}
    assert rouge_l(doc, ["x y"])["score"] == pytest.approx(1)
    assert rouge_l(doc, [" "])["score"] == 0


@pytest.mark.parametrize(
    ("task", "row", "expected"),
    [
        ("boolq", {**BOOLQ, "label": 0, "question": "is ice cold?"}, {**BOOLQ, "label": 0}),
        ("boolq", {"passage": "Ice is cold.", "question": "is ice cold", "answer": True}, BOOLQ),
        (
            "boolq",
            {"query": "Passage: Ice is cold.\nQuestion: is ice cold?", "choices": ["no", "yes"],
             "gold": 1},
            BOOLQ,
        ),
        ("arc_challenge", {**ARC, "id": "1"}, ARC),
        (
            "arc_challenge",
            {"query": "Question: What is ice?", "choices": ["water", "fire"], "gold": 0},
            ARC,
        ),
        ("hellaswag", {**HELLASWAG, "label": 0, "ind": 4}, HELLASWAG),
        (
            "mmlu_virology",
            {"question": "q", "choice0": "a", "choice1": "b", "choice2": "c", "choice3": "d",
             "answer": "2"},
            {"question": "q", "choices": ["a", "b", "c", "d"], "answer": 2},
        ),
        ("gsm8k", {"question": "q", "answer": "1"}, {"question": "q", "answer": "1"}),
    ],
)  # fmt: skip
def test_forms_of_a_row(task: str, row: Any, expected: Any) -> None:
    assert hub_row(task, row) == expected


def test_a_finished_query_of_hellaswag_stays_as_it_is(tmp_path: Path) -> None:
    row = {"query": "Skiing: A man skis. He", "choices": ["falls.", "flies."], "gold": 1}
    write_tasks({"hellaswag": _write(tmp_path / "rows.jsonl", [row])}, tmp_path)
    task = _task(tmp_path, "hellaswag")
    assert [each.args for each in task.instances] == [
        ("Skiing: A man skis. He", " falls."), ("Skiing: A man skis. He", " flies."),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("local", "message"),
    [
        ({"bolq": "x"}, "the harness has no task 'bolq'"),
        ({"boolq": "missing.jsonl"}, "no such file or folder"),
        ({"mmlu": "rows.jsonl"}, "mmlu is 57 tasks"),
        ({"boolq": "."}, "no file there is named after a split of boolq"),
        ({"gsm8k": "twice"}, "are both named after the split 'test'"),
    ],
)
def test_wrong_files_are_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, local: dict[str, str], message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    _write(Path("rows.jsonl"), [BOOLQ])
    for suffix in ("jsonl", "csv"):
        _write(Path(f"twice/test.{suffix}"), [{"question": "q", "answer": "1"}])
    with pytest.raises(UsageError) as error:
        write_tasks(local, tmp_path / "tasks")
    assert message in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([BOOLQ, {"passage": "p", "question": "q"}], "line 2: 'answer' is missing"),
        ([{**BOOLQ, "label": "perhaps"}], "line 1"),
        ([], "holds no row"),
        (["text"], "line 1 is not a JSON object"),
    ],
)
def test_a_wrong_row_is_named(tmp_path: Path, rows: list[object], message: str) -> None:
    write_tasks({"boolq": _write(tmp_path / "rows.jsonl", rows)}, tmp_path)
    with pytest.raises(UsageError) as error:
        _task(tmp_path, "boolq")
    assert message in str(error.value)
