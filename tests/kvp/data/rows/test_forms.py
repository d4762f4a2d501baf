"""Forms of a row: running text, dialogues and questions; other rows are skipped."""

import itertools
import json

import pytest

from kvp.data.rows.documents import read_documents
from kvp.data.rows.forms import document_of, questions_of
from kvp.data.rows.values import RowError
from kvp.data.splits import split_of
from kvp.data.task import TaskSettings
from kvp.errors import UsageError


def read(data, flag="data"):
    return read_documents(str(data), flag, TaskSettings(length=99))


def turns(*contents):
    roles = ("user", "assistant")
    return [{"role": roles[n % 2], "content": text} for n, text in enumerate(contents)]


def test_text_prompts_and_messages_become_documents():
    text = document_of({"text": "One."})
    assert (text.text, text.turns, text.split) == ("One.", (), split_of("One."))
    (prompt,) = document_of({"prompt": "a"}).questions
    assert (prompt.question, prompt.references) == ("a", ())
    (chat,) = document_of({"prompt": turns("a", "b", "c"), "answer": ["d", "e"]}).questions
    assert chat.messages == tuple(turns("a", "b", "c", "d, e"))


GOOD = '{"text": "good"}\n'


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"answer": "b", "query": "c"}', "has none of the accepted columns (it has: answer,"),
        ('{"text": {"a": 3}}', "has a value that is not text"),
        ('{"text": " "}', "has no text"),
        ('{"text": "a"', "is not JSON"),
        ("[1]", "is not a JSON object"),
        ('{"messages": [{"user": "x"}]}', "has a message without 'role' and 'content'"),
        ('{"messages": ["x"]}', "has a message that is not an object"),
        ('{"messages": []}', "has no exchange"),
        (json.dumps({"prompt": [*turns("a", "b"), {"role": "tool", "content": "c"}, *turns("d")]}),
         "has a prompt in which user and assistant do not take turns"),
        ('{"messages": [{"role": "user", "content": [{"type": "image"}]}]}',
         "has a part that is not text in a message"),
        ('{"context": "c", "question": "q", "answer": [null]}', "has no text in answer"),
        ('{"message_id": "m", "parent_id": null, "text": "x"}', "another form (KeyError: 'messa"),
        ('{"message_id": "m", "message_tree_id": "m", "text": null}', "tree without a reply"),
        ('{"question": "q", "answer": "x", "metric": "bleu"}', "has metric 'bleu', which is not"),
        ('{"context": "c", "questions": [{"question": "q"}, {"answer": "a"}]}',
         "has no text in question (its question 2)"),
        ('{"context": "c", "questions": ["q"]}',
         "has a question that is not an object (its question 1)"),
        ('{"context": "c", "question": "q", "questions": "r"}', "questions that are not a list"),
        ('{"text": "a", "text": "b"}', "is not JSON (a key is there twice)"),
        ('{"text": "a", "score": NaN}', "is not JSON (invalid literal for int() with"),
        ('{"context": "c", "question": "q", "answer": [true]}', "has a value that is not text"),
        ('{"question": "q", "max_new_tokens": 0}', "max_new_tokens 0, which is no whole number"),
        ('{"question": "q", "max_new_tokens": true}', "max_new_tokens True, which is no whole"),
        ('{"question": "q", "max_new_tokens": "8"}', "max_new_tokens '8', which is no whole num"),
        ('{"question": "q", "answer": "a", "task": ["x"]}', "not text in task"),
        ('{"a": ' * 5000, "is not JSON"),
        ('{"question": "q", "answer": "\\ud800"}', "has half of a surrogate pair"),
        ('{"question": "q", "answer": {"value": "x"}}', "has an object without 'text' in answer"),
        ('{"question": "q", "answer": [["x"]]}', "has a list within a list in answer"),
        ('{"messages": [{"role": "tool", "content": "a"}]}',
         "has no exchange that begins with the user and ends with the assistant: its message 1 has "
         "the role 'tool'"),
        (json.dumps({"messages": [*turns("a"), {"role": "assistant", "content": None,
                                                "tool_calls": [{"id": "x"}]}]}),
         ": its message 2 calls a tool"),
    ],
    ids=itertools.count(),
)  # fmt: skip
def test_one_bad_row_is_skipped_and_a_file_of_them_refused(tmp_path, line, message, one_line):
    path = tmp_path / "d.jsonl"
    path.write_text(GOOD + "\n" + line + "\n" + GOOD)
    usable, tally = read(path)
    assert [document.text for document in usable] == ["good", "good"]
    (note,) = tally.notes("--data")
    assert note.startswith("--data: skipped 1 of 3 rows: line 3 ")
    assert message in note
    path.write_text(line + "\n" + line + "\n")
    with one_line(UsageError, f"--chat {path}: none of its 2 rows can be used: line 1 "):
        read(path, "chat")


QUESTION = {"context": "Gate 5 opens at 9.\n", "question": "When?", "answer": "9"}


@pytest.mark.parametrize(
    ("row", "unread"),
    [
        ({**QUESTION, "a": 1, "b": 2, "c": 3, "d": 4}, "(4): a, b, c and 1 more"),
        ({"messages": turns("a", "b"), "conversation_id": 1, "text": "a", "answer": "c"},
         "(3): answer, conversation_id, text"),
        ({"text": "Gate 5 opens at 9.", "question": "When?", "answer": "9"},
         "(2): answer, question"),
        ({"context": "c", "questions": [{"question": "q", "id": 1}]}, "(1): questions.id"),
        ({"context": "c", "question": "q", "\x1b[2J": 1}, "(1): [2J"),
        ({"prompt": "Sum up.", "context": "c", "answer": "a"}, "(1): context"),
        ({**QUESTION, "prompt": "Sum up."}, "(1): prompt"),
    ],
)  # fmt: skip
def test_keys_that_are_not_read_are_listed_once(tmp_path, row, unread, jsonl):
    _, tally = read(jsonl(tmp_path / "d.jsonl", row, row))
    assert tally.notes("--data d") == (f"--data d: keys that were not read {unread}",)


def test_only_the_first_bad_rows_are_named(tmp_path, jsonl):
    data = jsonl(tmp_path / "d.jsonl", *[{"text": ""}] * 6, {"text": "a"})
    assert read(data)[1].notes("--data d") == (
        "--data d: skipped 6 of 7 rows: line 1 has no text, line 2 has no text, "
        "line 3 has no text and 3 more",
    )
    assert read(jsonl(tmp_path / "e.jsonl", {"text": "a"}, QUESTION))[1].notes("x") == ()


@pytest.mark.parametrize(
    "row",
    [
        {"messages": turns("a", "b", "c")},
        {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]},
        {"prompt": "a", "completion": "b"},
        {"prompt": turns("a"), "completion": [{"role": "assistant", "content": "b"}]},
        {"messages": [{"role": "system", "content": None}, *turns("a", "b")]},
    ],
)
def test_forms_of_a_dialogue(row):
    document = document_of(row)
    assert (document.turns, document.questions) == (tuple(turns("a", "b")), ())


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


@pytest.mark.parametrize("column", ["choices", "endings", "choice0"])
def test_multiple_choice_is_for_the_harness(column):
    with pytest.raises(RowError, match=r"\(metric choice\), which kvp lm-eval measures"):
        document_of({"question": "Which?", column: "red", "answer": "0"})


def test_a_row_may_ask_several_questions():
    asked = [{"question": "q1", "answer": "a1"}, {"question": "q2", "answers": ["a2", "b2"]}]
    row = {"context": "c", "metric": "f1", "task": "t", "questions": asked}
    first, second = questions_of({**row, "question": "q", "answer": "a"})
    assert (first.context, first.question, first.references) == ("c", "q1", ("a1",))
    assert (second.context, second.question, second.references) == ("c", "q2", ("a2", "b2"))
    assert {(one.metric, one.task) for one in (first, second)} == {("f1", "t")}
