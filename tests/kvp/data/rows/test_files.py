"""Files, folders and data sets of the hub that rows are read from."""

import json
import os
from pathlib import Path

import pytest

from kvp.data.rows.documents import read_documents
from kvp.data.task import TaskSettings
from kvp.errors import UsageError


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    folder = tmp_path / "cache"
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", folder)
    return folder


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
        ("c.json", lambda path: path.write_text("".join(json.dumps(r) + "\n" for r in ROWS))),
        ("[a].parquet", write_parquet),
    ],
)  # fmt: skip
def test_kinds_of_files(tmp_path, name, write):
    write(tmp_path / name)
    result = [document.text for document in documents(str(tmp_path / name))]
    assert result == [row["text"] for row in ROWS]


def test_of_a_folder_the_files_that_are_not_read_are_named(tmp_path):
    folder = tmp_path / "set"
    (folder / "sub" / ".hidden").mkdir(parents=True)
    for name in ("a.JSONL", "sub/b.Json"):
        (folder / name).write_text('{"text": "one"}')
    for name in ("README.md", "c.csv", "d.jsonl.gz", "sub/.hidden/e.jsonl"):
        (folder / name).write_text("")
    os.mkfifo(folder / "sub" / "f.jsonl")
    (folder / "g.jsonl").symlink_to("g.jsonl")
    (folder / "h").symlink_to(tmp_path)
    usable, tally = read(folder)
    assert [document.location for document in usable] == ["a.JSONL line 1", "sub/b.Json row 1"]
    left_out = ["README.md", "c.csv", "d.jsonl.gz", "g.jsonl", "h", "f.jsonl"]
    assert tally.left_out == left_out
    assert "files that were not read (6): README.md, c.csv, d.jsonl.gz and 3 more" in str(
        tally.notes("--data set")
    )
    (folder / "README.md").write_text("words")
    for name in ("a.JSONL", "sub/b.Json"):
        (folder / name).rename((folder / name).with_suffix(".TXT"))
    usable, tally = read(folder)
    assert '{"text":' in "".join(document.text for document in usable)
    assert tally.left_out == left_out[1:]


def test_of_a_folder_the_file_that_is_empty_or_wrong_is_named(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "one"}\n{"text": ""}')
    (tmp_path / "b.jsonl").write_text("\n")
    skipped = [("a.jsonl line 2", "has no text"), ("b.jsonl", "has nothing in it")]
    assert read(tmp_path)[1].skipped == skipped
    texts = tmp_path / "texts"
    texts.mkdir()
    (texts / "good.txt").write_text("words")
    for content in (b"caf\xe9", b"a\0b", b" "):
        (texts / "wrong.txt").write_bytes(content)
        with pytest.raises(UsageError, match=r"--data \S+/texts/wrong\.txt: .*(utf-8|UTF-8)"):
            read(texts)


def _write_columns(path):
    import pyarrow
    import pyarrow.parquet

    table = pyarrow.Table.from_arrays([pyarrow.array(["a"])] * 2, names=["text", "text"])
    pyarrow.parquet.write_table(table, path)


WRONG = {
    "empty.jsonl": ("\n", "there is nothing in it"),
    "a.csv": ("x", r"unknown kind of file; use one of .jsonl, .*, .txt"),
    "a.jsonl.gz": ("x", r"unknown kind of file; use one of .jsonl, .*, .txt"),
    "a.parquet": ("no parquet", r"--data .*a\.parquet: cannot be read"),
    "utf16.jsonl": ('{"text": "x"}'.encode("utf-16"), "cannot be read"),
    "utf16.txt": ("words".encode("utf-16"), "cannot be read as text"),
    "nul.txt": ("words".encode("utf-16-le"), "no text in it, or it is not in UTF-8"),
    "twice.json": ('[{"text": "x", "text": "y"}]', "cannot be read .*a key is there twice"),
    "nan.json": ('[{"text": "x", "a": NaN}]', "cannot be read .*NaN"),
    "twice.parquet": (_write_columns, "cannot be read .*a column is there twice"),
    "loop.jsonl": (lambda path: path.symlink_to(path), "no such file or folder"),
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


def rows(length):
    return [
        {
            "context": f"Context {number} of {length}. ", "question": "What?",
            "answer_prefix": " Answer:", "answer": ["1", "2"], "task": "qa_1",
            "max_new_tokens": 32,
        }
        for number in range(3)
    ]  # fmt: skip


def cached(cache, name, length):
    """What `load_dataset(name, length)` leaves in its cache."""
    from datasets import Dataset, DatasetInfo
    from datasets.arrow_writer import ArrowWriter

    owner, _, short = name.partition("/")
    folder = cache / f"{owner}___{short}" / length / "0.0.0" / ("0123456789" * 4)
    folder.mkdir(parents=True)
    features = Dataset.from_list(rows(length)).features
    with ArrowWriter(path=str(folder / f"{short}-test.arrow"), features=features) as writer:
        for row in rows(length):
            writer.write(row)
        examples, size = writer.finalize()
    part = {"name": "test", "num_bytes": size, "num_examples": examples, "dataset_name": short}
    DatasetInfo(
        features=features, builder_name="parquet", dataset_name=short, config_name=length,
        version="0.0.0", splits={"test": part},
    ).write_to_directory(str(folder))  # fmt: skip


def test_by_name_and_configuration(cache):
    for length in ("4096", "8192"):
        cached(cache, "somebody/ruler", length)
    for length in ("4096", "8192"):
        usable, _ = read(f"somebody/ruler:{length}")
        assert [one.questions[0].context for one in usable if one.questions] == [
            row["context"] for row in rows(length)
        ]
        first = usable[0].questions[0]
        assert (first.references, first.task, first.metric) == (("1", "2"), "qa_1", "part")
    with pytest.raises(UsageError, match=r"multiple .* configurations in the cache: (8192|4096)"):
        read("somebody/ruler")
    with pytest.raises(UsageError, match=r"--chat no/such: not a file \(.*data set that loads"):
        read("no/such", "chat")
