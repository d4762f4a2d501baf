"""Rows with choices, with several questions, and with columns of other names."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerBase

from kvp.config_groups import renamed_columns
from kvp.data.rows.files import RowError
from kvp.data.rows.forms import questions_of
from kvp.data.rows.samples import row_samples
from kvp.data.task import Source, TaskSettings, context_of

LIST = ["red", "green", "blue"]


def samples(data: Path, tokenizer: PreTrainedTokenizerBase, **changes: Any) -> Source:
    base: dict[str, Any] = {"split": "all", "count": 99, "seed": 0, "length": 300}
    settings = TaskSettings(**base | {"needs_reply": True} | changes)
    return row_samples(str(data), settings, tokenizer, flag="data")


def jsonl(path: Path, *rows: object) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


@pytest.mark.parametrize(
    ("columns", "gold"),
    [
        ({"choices": LIST, "gold": 2}, 2),
        ({"choices": LIST, "label": "1"}, 1),
        ({"choices": LIST, "answer": "green"}, 1),
        ({"choices": LIST, "answer": "C"}, 2),
        ({"choices": {"text": LIST, "label": ["A", "B", "C"]}, "answerKey": "C"}, 2),
        ({"endings": LIST, "label": "0"}, 0),
        ({"choice0": "4", "choice1": "0", "choice2": "2", "answer": "2"}, 2),
        ({"choice1": "a", "choice2": "b", "answer": "2"}, 1),
        ({"choices": LIST}, None),
    ],
)
def test_the_right_choice(columns: dict[str, Any], gold: int | None) -> None:
    (found,) = questions_of({"question": "Which?", **columns})
    assert found.metric == "choice"
    assert found.gold == gold
    assert found.answers == (() if gold is None else (found.choices[gold],))


@pytest.mark.parametrize(
    ("columns", "reason"),
    [
        ({"choices": ["1", "2", "3"], "answer": "2"}, "names more than one of its choices"),
        ({"choices": LIST, "gold": 3}, "has gold 3, which names none of its choices"),
        ({"choices": LIST, "answer": "yellow"}, "has answer 'yellow', which names none"),
        ({"choices": ["only"], "gold": 0}, "not a list of at least two"),
        ({"choices": {"text": LIST, "label": ["A"]}, "answerKey": "A"}, "not as many labels"),
        ({"answer": "x", "metric": "bleu"}, "has metric 'bleu', which is not one of all, part,"),
    ],
)
def test_rows_that_are_refused(columns: dict[str, Any], reason: str) -> None:
    with pytest.raises(RowError, match=reason):
        questions_of({"question": "Which?", **columns})


def test_a_truth_value_is_a_choice() -> None:
    (found,) = questions_of({"context": "c", "question": "Is it?", "answer": True})
    assert (found.choices, found.gold, found.answers) == (("no", "yes"), 1, ("yes",))


def test_forms_choose_their_metric() -> None:
    (gsm,) = questions_of({"question": "How many?", "answer": "9 * 2 = 18\n#### 18"})
    assert gsm.metric == "number"
    (qa,) = questions_of({"context": "c", "question": "q", "answer": "a", "task": "qa_1"})
    assert qa.metric == "part"
    (own,) = questions_of({"context": "c", "question": "q", "answer": "a", "metric": "f1"})
    assert own.metric == "f1"


@pytest.mark.parametrize(
    "row",
    [
        {"questions": ["q1", "q2"], "answers": ["a1", ["a2", "b2"]]},
        {"questions": [{"question": "q1", "answer": "a1"},
                       {"question": "q2", "answers": ["a2", "b2"]}]},
        {"multi_turns": [{"input": "q1", "answer": "a1"},
                         {"input": "q2", "answer": ["a2", "b2"]}]},
    ],
)  # fmt: skip
def test_several_questions_of_a_row(row: dict[str, Any]) -> None:
    first, second = questions_of({"context": "c", "metric": "f1", "task": "t", **row})
    assert (first.context, first.question, first.answers) == ("c", "q1", ("a1",))
    assert (second.context, second.question, second.answers) == ("c", "q2", ("a2", "b2"))
    assert {(one.metric, one.task) for one in (first, second)} == {("f1", "t")}


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"questions": ["q"], "answers": ["a", "b"]}, "has 1 questions but not as many answers"),
        ({"questions": ["q", ""], "answers": ["a", "b"]}, r"has no text in question \(its .* 2\)"),
        ({"questions": []}, "has an empty list of questions"),
    ],
)
def test_lists_of_questions_that_are_refused(row: dict[str, Any], reason: str) -> None:
    with pytest.raises(RowError, match=reason):
        questions_of({"context": "c", **row})


def test_questions_of_one_context_share_its_name(
    tmp_path: Path, tokenizer: PreTrainedTokenizerBase
) -> None:
    rows = [
        {"context": "first", "questions": ["q1", "q2"], "answers": ["a", "b"]},
        {"context": "second", "question": "q", "answer": "a"},
        {"context": "third", "question": "q1", "answer": "a"},
        {"context": "third", "question": "q2", "answer": "a"},
    ]
    source = samples(jsonl(tmp_path / "my.jsonl", *rows), tokenizer)
    names: dict[str, set[str]] = {}
    for number, sample in enumerate(source):
        assert sample.id.startswith(f"my/all/0/{number}")
        names.setdefault(sample.context, set()).add(context_of(sample.id))
    assert {context: len(found) for context, found in names.items()} == {
        "first": 1, "second": 1, "third": 1,
    }  # fmt: skip
    assert len(set.union(*names.values())) == 3
    (alone,) = names["second"]
    assert "@" not in alone
    fewer = samples(tmp_path / "my.jsonl", tokenizer, count=2)
    assert [sample.id for sample in fewer] == [sample.id for sample in source][:2]


def test_the_metric_of_all_rows(tmp_path: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    talk = [{"role": "user", "content": "Hi" * 90}, {"role": "assistant", "content": "Hello"}]
    rows = [
        {"context": "c", "question": "q", "answer": "7", "metric": "f1"},
        {"context": "c", "question": "r", "answer": "seven"},
        {"prompt": "p", "answers": ["8", "9"]},
        {"messages": talk},
        {"text": "words " * 99},
        {"question": "q", "answer": None},
    ]
    data = jsonl(tmp_path / "my.jsonl", *rows)
    own = {sample.references: sample.metric for sample in samples(data, tokenizer)}
    assert own == {(): "none", ("7",): "f1", ("seven",): "all", ("8", "9"): "all"}
    source = samples(data, tokenizer, metric="rouge_l", answer_prefix="So")
    assert {sample.references: sample.metric for sample in source} == dict.fromkeys(
        [("7",), ("seven",), ("8", "9"), ("Hello",)], "rouge_l"
    )
    assert {sample.answer_prefix for sample in source if sample.context} == {"So"}
    assert "line 5 is running text, not for metric rouge_l" in source.notes[0]
    assert "line 6 has no answer to measure" in source.notes[0]
    source = samples(data, tokenizer, metric="number")
    assert "line 2 has an answer without a number, for metric number" in source.notes[0]
    source = samples(data, tokenizer, metric="choice")
    assert not source
    assert "has no choices" in source.notes[0]


def test_columns_of_other_names(tmp_path: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    with (tmp_path / "my.csv").open("w", newline="") as file:
        csv.writer(file).writerows([["query", "A", "B", "right"], ["Which?", "x", "y", "1"]])
    names = renamed_columns("question=query, choice0=A,choice1=B,gold=right")
    (sample,) = samples(tmp_path / "my.csv", tokenizer, columns=names)
    assert (sample.question, sample.choices, sample.gold) == ("Which?", ("x", "y"), 1)
    jsonl(tmp_path / "other.jsonl", {"query": "q", "answer": "a"}, {"question": "q"})
    source = samples(tmp_path / "other.jsonl", tokenizer, columns={"question": "query"})
    assert len(source) == 1
    assert "line 2 has no column 'query', which --columns names" in source.notes[0]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("question", "--columns: 'question' is not NEW=OLD"),
        ("", "is not NEW=OLD"),
        ("answer=a,answer=b", "'answer' is named twice"),
    ],
)
def test_columns_that_are_refused(text: str, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        renamed_columns(text)
