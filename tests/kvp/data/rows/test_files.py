"""Files, folders and data sets of the hub that rows are read from."""

import json
import os
from pathlib import Path

import pytest

from kvp.data.rows.documents import read_documents
from kvp.data.task import TaskSettings
from kvp.errors import UsageError


def read(data, flag="data"):
    return read_documents(str(data), flag, TaskSettings(length=99))


def documents(data):
    return read(data)[0]


ROWS = [{"text": "one"}, {"text": 'two, and "more"\nhere'}]


def write_parquet(path):
    from datasets import Dataset

    Dataset.from_list(ROWS).to_parquet(str(path))


@pytest.mark.parametrize(
    ("name", "write"),
    [
        ("a.json", lambda path: path.write_text(json.dumps(ROWS))),
        ("c.json", lambda path: path.write_text("\n".join(map(json.dumps, ROWS)))),
        ("[a].parquet", write_parquet),
    ],
)
def test_files_of_every_kind_are_read(tmp_path, name, write):
    write(tmp_path / name)
    result = [document.text for document in documents(str(tmp_path / name))]
    assert result == [row["text"] for row in ROWS]


def test_files_of_a_folder_that_are_not_read_are_named(tmp_path):
    folder = tmp_path / "set"
    (folder / "sub" / ".hidden").mkdir(parents=True)
    for name in ("a.JSONL", "sub/b.Json"):
        (folder / name).write_text('{"text": "one"}')
    for name in ("README.md", "c.csv", "d.jsonl.gz", "sub/.hidden/e.jsonl"):
        (folder / name).write_text("")
    os.mkfifo(folder / "sub" / "f.jsonl")
    (folder / "h").symlink_to(tmp_path)
    usable, tally = read(folder)
    assert [document.location for document in usable] == ["a.JSONL line 1", "sub/b.Json row 1"]
    assert tally.left_out == ["README.md", "c.csv", "d.jsonl.gz", "h", "f.jsonl"]
    assert "files that were not read (5): README.md, c.csv, d.jsonl.gz and 2 more" in str(
        tally.notes("--data set")
    )


def test_the_wrong_file_of_a_folder_is_named(tmp_path):
    (tmp_path / "good.txt").write_text("words")
    for content in (b"caf\xe9", b"a\0b", b" "):
        (tmp_path / "wrong.txt").write_bytes(content)
        with pytest.raises(UsageError, match=r"--data \S+/wrong\.txt: .*(utf-8|UTF-8)"):
            read(tmp_path)


WRONG = {
    "empty.jsonl": ("\n", "there is nothing in it"),
    "a.csv": ("x", r"unknown kind of file; use one of .jsonl, .*, .txt"),
    "a.parquet": ("no parquet", r"--data .*a\.parquet: cannot be read"),
    "utf16.jsonl": ('{"text": "x"}'.encode("utf-16"), "cannot be read"),
    "twice.json": ('[{"text": "x", "text": "y"}]', "cannot be read .*a key is there twice"),
    "nan.json": ('[{"text": "x", "a": NaN}]', "cannot be read .*NaN"),
    "pipe.jsonl": (os.mkfifo, "is no regular file"),
    "folder.jsonl": (Path.mkdir, "no data in this folder"),
}


@pytest.mark.parametrize("name", WRONG)
def test_files_that_are_refused(tmp_path, name, one_line):
    content, message = WRONG[name]
    path = tmp_path / name
    if callable(content):
        content(path)
    else:
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with one_line(UsageError, match=message):
        read(path)


def test_data_sets_of_the_hub_are_read_by_name_and_configuration(monkeypatch):
    def load_dataset(name, configuration):
        if name != "somebody/ruler":
            raise ValueError("no\nsuch")
        row = {"context": f"Context of {configuration}. ", "question": "What?", "task": "qa_1"}
        return {"test": [row, row], "train": [row]}

    monkeypatch.setattr("datasets.load_dataset", load_dataset)
    usable = documents("somebody/ruler:4096")
    assert [one.questions[0].context for one in usable] == ["Context of 4096. "] * 3
    assert [one.location for one in usable] == ["test row 1", "test row 2", "train row 1"]
    assert documents("somebody/ruler")[0].questions[0].context == "Context of None. "
    with pytest.raises(UsageError, match=r"--chat no/such: not a file \(.*data set that loads"):
        read("no/such", "chat")
