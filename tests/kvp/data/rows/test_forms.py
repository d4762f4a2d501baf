"""Forms of a row: running text, dialogues, questions, choices; and what is no row."""

import json

import pytest

from kvp.data.rows.documents import read_documents
from kvp.data.rows.forms import document_of, questions_of
from kvp.data.rows.values import RowError
from kvp.data.synthetic.text import split_of
from kvp.data.task import TaskSettings
from kvp.errors import UsageError


def read(data, flag="data"):
    return read_documents(str(data), flag, TaskSettings(length=99))


def jsonl(path, *rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def turns(*contents):
    roles = ("user", "assistant")
    return [{"role": roles[n % 2], "content": text} for n, text in enumerate(contents)]


def test_text_and_messages():
    text = document_of({"text": "One."})
    assert (text.text, text.turns, text.split) == ("One.", (), split_of("One."))
    assert document_of({"messages": turns("a", "b", "c")}).turns == tuple(turns("a", "b"))
    prompt = document_of({"prompt": "a"})
    assert prompt.alone
    assert [turn["content"] for turn in prompt.turns] == ["a", ""]


GOOD = '{"text": "good"}\n'


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"answer": "b", "query": "c"}', "has none of the accepted columns (it has: answer,"),
        ('{"text": {"a": 3}}', "has a part that is not text"),
        ('{"text": null}', "has no text"),
        ('{"text": " "}', "has no text"),
        ('{"text": "a"', "is not JSON"),
        ("[1]", "is not a JSON object"),
        ('{"messages": [{"user": "x"}]}', "has a message without 'role' and 'content'"),
        ('{"messages": ["x"]}', "has a message that is not an object"),
        ('{"messages": []}', "has no exchange"),
        (json.dumps({"prompt": [*turns("a", "b"), {"role": "tool", "content": "c"}, *turns("d")]}),
         "has a prompt in which user and assistant do not take turns"),
        ('{"messages": [{"role": "user", "content": null}]}', "has no text in a message"),
        ('{"messages": [{"role": "user", "content": [{"type": "image"}]}]}',
         "has a part that is not text in a message"),
        ('{"context": "c", "question": "q", "answer": [null]}', "has no text in answer"),
        ('{"message_id": null, "parent_id": null, "text": "x"}', "has no usable message_id"),
        ('{"question": "q", "answer": "x", "metric": "bleu"}', "has metric 'bleu', which is not"),
        ('{"context": "c", "questions": ["q"], "answers": ["a", "b"]}',
         "has 1 questions but not as many answers"),
        ('{"context": "c", "questions": ["q", ""], "answers": ["a", "b"]}',
         "has no text in question (its question 2)"),
        ('{"context": "c", "questions": []}', "has an empty list of questions"),
    ],
)  # fmt: skip
def test_one_bad_row_is_skipped_and_a_file_of_them_refused(tmp_path, line, message):
    path = tmp_path / "d.jsonl"
    path.write_text(GOOD + "\n" + line + "\n" + GOOD)
    usable, tally = read(path)
    assert [document.text for document in usable] == ["good", "good"]
    note = tally.note()
    assert note.startswith("skipped 1 of 3 rows: line 3 ")
    assert message in note
    path.write_text(line + "\n" + line + "\n")
    with pytest.raises(UsageError) as error:
        read(path, "chat")
    assert f"--chat {path}: none of its 2 rows can be used: line 1 " in str(error.value)
    assert "conversations; prompt, with or without completion" in str(error.value)
    assert "\n" not in str(error.value)


def test_only_the_first_bad_rows_are_named(tmp_path):
    data = jsonl(tmp_path / "d.jsonl", *[{"text": ""}] * 6, {"text": "a"})
    assert read(data)[1].note() == (
        "skipped 6 of 7 rows: line 1 has no text, line 2 has no text, line 3 has no text and 3 more"
    )
    assert read(jsonl(tmp_path / "e.jsonl", {"text": "a"}))[1].note() is None


@pytest.mark.parametrize(
    ("row", "contents"),
    [
        ({"messages": turns("a", "b")}, ["a", "b"]),
        ({"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]}, None),
        ({"prompt": "a", "completion": "b"}, None),
        ({"prompt": turns("a"), "completion": [{"role": "assistant", "content": "b"}]}, None),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}, "!"]},
                       {"role": "assistant", "content": "b"}]}, ["a!", "b"]),
        ({"messages": [{"role": "system", "content": None}, *turns("a", "b")]}, None),
        ({"messages": [*turns("a", "b"), {"role": "tool", "content": None}]}, None),
    ],
)  # fmt: skip
def test_forms_of_a_dialogue(tmp_path, row, contents):
    ((document,), _) = read(jsonl(tmp_path / "d.jsonl", row))
    assert [turn["content"] for turn in document.turns] == (contents or ["a", "b"])
    assert [turn["role"] for turn in document.turns] == ["user", "assistant"]
    assert not document.alone


@pytest.mark.parametrize(
    ("columns", "answers", "metric"),
    [
        ({"answer": ["1", "2"]}, ("1", "2"), "all"),
        ({"answer": 7, "task": "qa_1"}, ("7",), "part"),
        ({"answers": {"text": ["x", "x", "y"], "answer_start": [0, 0, 1]}}, ("x", "y"), "part"),
        ({"answers": ["x"], "metric": "part"}, ("x",), "part"),
        ({"answer": "9 * 2 = 18\n#### 18"}, ("9 * 2 = 18\n#### 18",), "number"),
        ({}, (), "all"),
    ],
)
def test_questions_and_their_answers(columns, answers, metric):
    row = {"context": "c", "question": "q", "answer_prefix": "p", "max_new_tokens": 5, **columns}
    (found,) = document_of(row).questions
    assert (found.context, found.question, found.references) == ("c", "q", answers)
    assert (found.metric, found.answer_prefix, found.max_new_tokens) == (metric, "p", 5)


@pytest.mark.parametrize(
    "columns",
    [
        {"choices": ["red", "green"], "gold": 1},
        {"choices": {"text": ["red", "green"], "label": ["A", "B"]}, "answerKey": "B"},
        {"endings": ["red", "green"], "label": "0", "metric": "choice_norm"},
        {"choice0": "4", "choice1": "0", "answer": "0"},
        {"context": "c", "answer": True},
        {"context": "c", "question": None, "choices": ["red", "green"]},
        {"context": "c", "questions": ["q1", "q2"], "answers": [True, False]},
    ],
)
def test_multiple_choice_is_for_the_harness(columns):
    with pytest.raises(RowError, match=r"\(metric choice\), which kvp lm-eval measures"):
        document_of({"question": "Which?", **columns})


@pytest.mark.parametrize(
    "row",
    [
        {"questions": ["q1", "q2"], "answers": ["a1", ["a2", "b2"]]},
        {"questions": [{"question": "q1", "answer": "a1"},
                       {"question": "q2", "answers": ["a2", "b2"]}]},
    ],
)  # fmt: skip
def test_several_questions_of_a_row(row):
    first, second = questions_of({"context": "c", "metric": "f1", "task": "t", **row})
    assert (first.context, first.question, first.references) == ("c", "q1", ("a1",))
    assert (second.context, second.question, second.references) == ("c", "q2", ("a2", "b2"))
    assert {(one.metric, one.task) for one in (first, second)} == {("f1", "t")}
