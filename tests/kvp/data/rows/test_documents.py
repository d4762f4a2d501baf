from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from kvp.data.rows.documents import read_documents
from kvp.data.rows.files import Tally
from kvp.data.rows.forms import Document
from kvp.data.synthetic.text import split_of
from kvp.data.task import TaskSettings
from kvp.errors import UsageError


def read(data: object, flag: str = "data") -> tuple[tuple[Document, ...], Tally]:
    return read_documents(str(data), flag, TaskSettings(length=99))


def documents(data: object) -> tuple[Document, ...]:
    return read(data)[0]


def jsonl(path: Path, *rows: object) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def turns(*contents: str) -> list[dict[str, str]]:
    roles = ("user", "assistant")
    return [{"role": roles[n % 2], "content": text} for n, text in enumerate(contents)]


def message(name: str, parent: str | None, **facts: Any) -> dict[str, Any]:
    role = "prompter" if len(name) % 2 else "assistant"
    return {
        "message_id": name, "parent_id": parent, "message_tree_id": name[0], "role": role,
        "text": f"text {name}", "rank": None, "deleted": False, **facts,
    }  # fmt: skip


def test_text_and_messages(tmp_path: Path) -> None:
    data = jsonl(tmp_path / "d.jsonl", {"text": "One."}, {"messages": turns("a", "b", "c")})
    text, chat = documents(data)
    assert (text.text, text.turns, text.split) == ("One.", (), split_of("One."))
    assert chat.turns == tuple(turns("a", "b"))


GOOD = '{"text": "good"}\n'


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"answer": "b", "query": "c"}', "has none of the accepted columns (it has: answer,"),
        ('{"text": 3}', "has a value that is not text"),
        ('{"text": null}', "has no text"),
        ('{"text": " "}', "has no text"),
        ('{"text": "a"', "is not JSON"),
        ("[1]", "is not a JSON object"),
        ('{"messages": [{"user": "x"}]}', "has a message without 'role' and 'content'"),
        ('{"messages": ["x"]}', "has a message that is not an object"),
        ('{"messages": []}', "has no exchange"),
        ('{"messages": [{"role": "user", "content": null}]}', "has no text in a message"),
        (
            '{"messages": [{"role": "user", "content": [{"type": "image"}]}]}',
            "has a part that is not text in a message",
        ),
        ('{"context": "c", "question": "q", "max_new_tokens": "x"}', "has cells of another"),
        ('{"context": "c", "question": "q", "answer": [null]}', "has an answer that is neither"),
        ('{"message_id": null, "parent_id": null, "text": "x"}', "has no usable message_id"),
    ],
)
def test_one_bad_row_is_skipped_and_a_file_of_them_refused(
    tmp_path: Path, line: str, message: str
) -> None:
    path = tmp_path / "d.jsonl"
    path.write_text(GOOD + "\n" + line + "\n" + GOOD)
    usable, tally = read(path)
    assert [document.text for document in usable] == ["good", "good"]
    note = tally.note()
    assert note is not None
    assert note.startswith("skipped 1 of 3 rows: line 3 ")
    assert message in note
    path.write_text(line + "\n" + line + "\n")
    with pytest.raises(UsageError) as error:
        read(path, "chat")
    assert f"--chat {path}: none of its 2 rows can be used: line 1 " in str(error.value)
    assert "conversations; prompt, with or without completion" in str(error.value)
    assert "\n" not in str(error.value)


def test_only_the_first_bad_rows_are_named(tmp_path: Path) -> None:
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
        ({"prompt": {"text": "a", "role": "prompter", "replies": [
            {"text": "c", "role": "assistant", "rank": 1},
            {"text": "b", "role": "assistant", "rank": 0}]}}, None),
    ],
)  # fmt: skip
def test_forms_of_a_dialogue(
    tmp_path: Path, row: dict[str, Any], contents: list[str] | None
) -> None:
    (document,) = documents(jsonl(tmp_path / "d.jsonl", row))
    assert [turn["content"] for turn in document.turns] == (contents or ["a", "b"])
    assert [turn["role"] for turn in document.turns] == ["user", "assistant"]
    assert not document.alone
    (document,) = documents(jsonl(tmp_path / "d.jsonl", {"prompt": "a"}))
    assert document.alone
    assert [turn["content"] for turn in document.turns] == ["a", ""]


def test_questions_and_their_answers(tmp_path: Path) -> None:
    base = {"context": "c", "question": "q"}
    data = jsonl(
        tmp_path / "d.jsonl",
        {**base, "answer": ["1", "2"], "answer_prefix": "p"},
        {**base, "answer": 7, "task": "qa_1", "max_new_tokens": 5},
        {**base, "answers": {"text": ["x", "x", "y"], "answer_start": [0, 0, 1]}},
        {**base, "answers": ["x"], "metric": "part"},
        base,
    )
    questions = [document.questions[0] for document in documents(data)]
    assert [(q.answers, q.metric) for q in questions] == [
        (("1", "2"), "all"), (("7",), "part"), (("x", "y"), "part"), (("x",), "part"), ((), "all"),
    ]  # fmt: skip
    assert questions[0].answer_prefix == "p"
    assert questions[1].max_new_tokens == 5


def test_a_file_that_is_missing_or_empty(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no such file or folder"):
        documents(str(tmp_path / "none.jsonl"))
    (tmp_path / "empty.jsonl").write_text("\n")
    with pytest.raises(UsageError, match="there is nothing in it"):
        documents(str(tmp_path / "empty.jsonl"))
    (tmp_path / "a.bin").write_text("x")
    with pytest.raises(UsageError, match=r"unknown kind of file; use one of .jsonl, .*, .txt"):
        documents(str(tmp_path / "a.bin"))


ROWS = [{"text": "one"}, {"text": 'two, and "more"\nhere'}]


def write_csv(path: Path) -> None:
    path.write_text('text,n\none,1\n"two, and ""more""\nhere",2\n')


def write_parquet(path: Path) -> None:
    from datasets import Dataset

    Dataset.from_list(ROWS).to_parquet(str(path))


@pytest.mark.parametrize(
    ("name", "write"),
    [
        ("a.csv", write_csv),
        ("a.json", lambda path: path.write_text(json.dumps(ROWS))),
        ("b.json", lambda path: path.write_text(json.dumps({"data": ROWS}))),
        ("c.json", lambda path: path.write_text("".join(json.dumps(r) + "\n" for r in ROWS))),
        ("a.jsonl.gz", lambda path: path.write_bytes(
            gzip.compress("".join(json.dumps(r) + "\n" for r in ROWS).encode()))),
        ("[a].parquet", write_parquet),
    ],
)  # fmt: skip
def test_kinds_of_files(
    tmp_path: Path, name: str, write: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", str(tmp_path / "cache"))
    write(tmp_path / name)
    result = [document.text for document in documents(str(tmp_path / name))]
    assert result == [row["text"] for row in ROWS]


def test_a_folder_of_files_and_one_of_save_to_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from datasets import Dataset, DatasetDict

    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", str(tmp_path / "cache"))
    folder = tmp_path / "set"
    (folder / "sub").mkdir(parents=True)
    (folder / ".cache").mkdir()
    jsonl(folder / "train.jsonl", {"text": "one"}, {"text": ""})
    jsonl(folder / ".cache" / "x.jsonl", {"text": "hidden"})
    (folder / "sub" / "b.csv").write_text("text\ntwo\n")
    usable, tally = read(folder)
    assert [document.text for document in usable] == ["two", "one"]
    assert tally.skipped == [("train.jsonl line 2", "has no text")]
    Dataset.from_list(ROWS).save_to_disk(str(tmp_path / "plain"))
    DatasetDict({"a": Dataset.from_list(ROWS[:1]), "b": Dataset.from_list(ROWS[1:])}).save_to_disk(
        str(tmp_path / "parts")
    )
    for name in ("plain", "parts"):
        result = [document.text for document in documents(str(tmp_path / name))]
        assert result == [row["text"] for row in ROWS]
    sets = tmp_path / "configurations"
    for number, name in enumerate(("16384", "4096")):
        part = DatasetDict({"test": Dataset.from_list(ROWS[number : number + 1])})
        part.save_to_disk(str(sets / name))
    assert [(one.text, one.location) for one in documents(sets)] == [
        (ROWS[0]["text"], "16384 test row 1"), (ROWS[1]["text"], "4096 test row 1"),
    ]  # fmt: skip
    (tmp_path / "nothing").mkdir()
    with pytest.raises(UsageError, match="no data in this folder"):
        documents(str(tmp_path / "nothing"))


def test_a_damaged_file_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "a.parquet").write_text("no parquet")
    with pytest.raises(UsageError, match=r"--data .*a\.parquet: cannot be read"):
        documents(str(tmp_path / "a.parquet"))
    (tmp_path / "a.csv").write_text("text\none\ntwo,three\n")
    assert read(tmp_path / "a.csv")[1].skipped == [("line 3", "has more cells than the header")]


@pytest.mark.parametrize("named", [True, False])
def test_trees_of_a_file(tmp_path: Path, named: bool) -> None:
    rows = [message("a", None), message("aa", "a"), message("b", None), message("bb", "b")]
    rows.append(message("c", None))
    if not named:
        for row in rows:
            del row["message_tree_id"]
    usable, tally = read(jsonl(tmp_path / "d.jsonl", *rows))
    assert [document.turns[1]["content"] for document in usable] == ["text aa", "text bb"]
    assert [document.split for document in usable] == [split_of("a"), split_of("b")]
    assert tally.skipped == [("line 5", "is of a message tree without a reply")]


def test_an_unknown_data_set_is_one_line() -> None:
    with pytest.raises(UsageError, match=r"--chat no/such: not a file \(.*data set that loads"):
        read("no/such", "chat")
