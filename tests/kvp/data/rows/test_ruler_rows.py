"""Rows as RULER's scripts write them: context and question as in the published set."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvp.data.rows.documents import read_documents
from kvp.data.rows.forms import Question
from kvp.data.ruler import OWN_TASKS, generate
from kvp.data.task import Sample, TaskSettings
from kvp.data.tasks.ruler_qa import DocumentQuestion, document_prompt


def count(text: str) -> int:
    return len(re.findall(r"\w+|[^\w\s]", text))


def sample_of(task: str) -> Sample:
    if task in OWN_TASKS:
        return generate(task, count_tokens=count, length=1500, seed=0, index=0, split="test")
    asked = DocumentQuestion(
        text="Who?", answers=("A", "B"), documents=("d1", "d2"), answering=("d1",)
    )
    return replace(document_prompt("n", "test", asked, ("d1", "d2")), task=task)


def row_of(sample: Sample, *, prefix: bool) -> dict[str, Any]:
    row = {"index": 0, "outputs": list(sample.references), "length": 1400}
    if prefix:
        return {
            **row, "input": sample.context + sample.question, "answer_prefix": sample.answer_prefix,
            "length_w_model_temp": 1410,
        }  # fmt: skip
    return {**row, "input": sample.context + sample.question + sample.answer_prefix}


def question_of(data: Path) -> Question:
    ((document,), _) = read_documents(str(data), "data", TaskSettings(length=99))
    (question,) = document.questions
    return question


@pytest.mark.parametrize("prefix", [True, False])
@pytest.mark.parametrize("task", [*OWN_TASKS, "qa_1", "qa_2"])
def test_a_row_is_parted_as_the_published_one(tmp_path: Path, task: str, prefix: bool) -> None:
    sample = sample_of(task)
    name = f"{task}/validation.jsonl" if prefix else f"{task}.jsonl"
    path = tmp_path / "set" / name
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps(row_of(sample, prefix=prefix)) + "\n")
    for data in (path, tmp_path / "set"):
        question = question_of(data)
        assert question.context == sample.context
        assert question.question == sample.question
        assert question.answer_prefix == sample.answer_prefix
        assert question.answers == sample.references
        assert (question.task, question.max_new_tokens) == (task, sample.max_new_tokens)
        assert question.metric == sample.metric


def test_without_a_name_the_prompt_says_what_it_is(tmp_path: Path) -> None:
    for task, tokens in (("niah_multivalue", 128), ("vt", 30), ("fwe", 50), ("qa_1", 32)):
        path = tmp_path / "rows.jsonl"
        path.write_text(json.dumps(row_of(sample_of(task), prefix=True)) + "\n")
        question = question_of(path)
        assert question.task is None
        assert question.max_new_tokens == tokens
        path.write_text(json.dumps({**row_of(sample_of(task), prefix=True), "task": task}) + "\n")
        assert question_of(path).task == task


def test_another_input_is_a_bad_row(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    rows = [row_of(sample_of("vt"), prefix=True), {"input": "Hello?", "outputs": ["x"]}]
    rows.append({"input": None, "outputs": ["x"]})
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert read_documents(str(path), "data", TaskSettings(length=99))[1].skipped == [
        ("line 2", "has an input without a question of RULER's"),
        ("line 3", "has no text in input"),
    ]
