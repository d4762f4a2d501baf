"""Files of SQuAD and HotpotQA in the forms that people have them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kvp.data.synthetic.text import SPLITS
from kvp.data.tasks.ruler_qa import QuestionSet, read_questions
from kvp.errors import UsageError


def written(path: Path, content: object) -> str:
    path.write_text(json.dumps(content), encoding="utf-8")
    return str(path)


def jsonl(path: Path, *rows: object) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def asked(text: str, *answers: str, impossible: bool = False) -> dict[str, Any]:
    return {
        "question": text, "id": text, "is_impossible": impossible,
        "answers": [{"text": answer, "answer_start": 0} for answer in answers],
    }  # fmt: skip


ARTICLE = {
    "title": "Rivers",
    "paragraphs": [
        {"context": "The Aare is long.",
         "qas": [asked("What is long? ", "Aare", "The Aare", "Aare"),
                 asked("Why?", impossible=True)]},
        {"context": "Nothing is asked here.", "qas": []},
    ],
}  # fmt: skip


@pytest.mark.parametrize("content", [{"version": "v2.0", "data": [ARTICLE]}, {"data": [ARTICLE]}])
def test_squads_own_file(tmp_path: Path, content: object) -> None:
    read = read_questions(written(tmp_path / "dev.json", content), "squad")
    (question,) = read.questions
    assert (question.text, question.answers) == ("What is long?", ("Aare", "The Aare"))
    assert question.documents == question.answering == ("The Aare is long.",)
    assert question.article == "Rivers"
    assert list(read.documents) == ["Nothing is asked here.", "The Aare is long."]
    assert set(read.documents.values()) == {"Rivers"}
    assert list(read.owners) == ["The Aare is long."]


def test_rows_of_the_hub_and_plain_ones(tmp_path: Path) -> None:
    rows = [
        {"context": "c1", "question": "q1", "title": "t", "answers": {"text": ["a", "b"]}},
        {"context": "c2", "question": "q2", "answers": {"text": []}},
        {"context": "c3", "question": "q3", "answer": "a"},
        {"context": "c4", "question": "q4", "answers": ["a", "a"]},
    ]
    read = read_questions(jsonl(tmp_path / "s.jsonl", *rows), "squad")
    assert [(one.text, one.answers) for one in read.questions] == [
        ("q1", ("a", "b")), ("q3", ("a",)), ("q4", ("a",)),
    ]  # fmt: skip
    assert list(read.documents) == ["c1", "c2", "c3", "c4"]
    assert read.tally.note() is None


OFFICIAL = {
    "_id": "1", "question": "Who?", "answer": "Ada",
    "supporting_facts": [["A", 0], ["B", 1]],
    "context": [["A", ["Ada was", " born."]], ["B", ["Be."]], ["C", ["Sea."]]],
}  # fmt: skip
OF_THE_HUB = {
    "id": "1", "question": "Who?", "answer": "Ada",
    "supporting_facts": {"title": ["A", "B"], "sent_id": [0, 1]},
    "context": {"title": ["A", "B", "C"], "sentences": [["Ada was", " born."], ["Be."], ["Sea."]]},
}  # fmt: skip


@pytest.mark.parametrize("row", [OFFICIAL, OF_THE_HUB])
def test_hotpotqas_forms(tmp_path: Path, row: dict[str, Any]) -> None:
    (question,) = read_questions(written(tmp_path / "h.json", [row]), "hotpotqa").questions
    assert question.documents == ("A\nAda was born.", "B\nBe.", "C\nSea.")
    assert question.answering == ("A\nAda was born.", "B\nBe.")
    assert question.answers == ("Ada",)
    without = {name: value for name, value in row.items() if name != "supporting_facts"}
    (question,) = read_questions(written(tmp_path / "w.json", [without]), "hotpotqa").questions
    assert question.answering == question.documents


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"context": "c"}, "has neither 'paragraphs' nor 'context' and 'question'"),
        ({"context": "c", "question": "", "answer": "a"}, "has no text in question"),
        ({"paragraphs": [3]}, "has cells of another form (AttributeError"),
    ],
)
def test_bad_rows_of_squad_are_counted(tmp_path: Path, row: object, reason: str) -> None:
    good = {"context": "c", "question": "q", "answer": "a"}
    read = read_questions(jsonl(tmp_path / "s.jsonl", good, row, good), "squad")
    assert len(read.questions) == 2
    assert str(read.tally.note()).startswith(f"skipped 1 of 3 rows: line 2 {reason}")
    with pytest.raises(UsageError) as error:
        read_questions(jsonl(tmp_path / "t.jsonl", row), "squad")
    assert "none of its 1 rows has a question with an answer: line 1 has" in str(error.value)
    assert "\n" not in str(error.value)


def test_no_answering_document_is_in_two_splits(tmp_path: Path) -> None:
    """Question n shares a document with question n + 1 in every block of three."""
    rows = []
    for number in range(120):
        block, place = divmod(number, 3)
        titles = [f"{block}-{place}", f"{block}-{place + 1}", f"far {number % 7}"]
        rows.append(
            {
                "question": f"q{number}", "answer": "a",
                "supporting_facts": [[title, 0] for title in titles[:2]],
                "context": [[title, [f"about {title}"]] for title in titles],
            }
        )  # fmt: skip
    read: QuestionSet = read_questions(jsonl(tmp_path / "h.jsonl", *rows), "hotpotqa")
    of_split = {split: read.of_split(split) for split in SPLITS}
    assert sum(map(len, of_split.values())) == len(read.of_split("all")) == 120
    assert all(of_split.values())
    answering = [
        {text for question in questions for text in question.answering}
        for questions in of_split.values()
    ]
    assert not answering[0] & answering[1]
    assert not answering[0] & answering[2]
    assert not answering[1] & answering[2]
    blocks = [{int(q.text[1:]) // 3 for q in questions} for questions in of_split.values()]
    assert sum(map(len, blocks)) == 40
    far = "far 1\nabout far 1"
    assert all(read.may_show(far, split) for split in (*SPLITS, "all"))
    first = read.questions[0].answering[0]
    assert [read.may_show(first, split) for split in SPLITS].count(True) == 1
