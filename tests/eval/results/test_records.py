from pathlib import Path

import pytest
from toy_results import result_record

from eval.results.parts import RecordParts
from eval.results.record_schemas import RESULTS_ROWS, RecordKind, ResultsRow, TimingRow
from eval.results.records import RecordFile, key_of, merge_records, read_records
from kvp.artifacts.files import JsonLines
from kvp.errors import ResultsError


def _record(example, **fields):
    usual = {"budget_spec": None, "task": "x", "score": 1.0, "prompt_digest": "0"}
    return result_record("full", example=example, **usual | fields)


def test_records_come_back_in_order_and_their_keys_are_known(tmp_path):
    path = tmp_path / "rows.jsonl"
    file = RecordFile(path)
    file.append([_record("a"), _record("b", prediction="é\n")])
    file.append([_record("c")])
    assert [record["example"] for record in read_records(path)] == ["a", "b", "c"]
    assert [record["prediction"] for record in read_records(path)] == ["", "é\n", ""]
    keys = {key_of(_record(name)) for name in "abc"}
    assert RecordFile(path).values.keys() == file.values.keys() == keys


def test_two_records_of_one_key_are_refused(tmp_path):
    path = tmp_path / "rows.jsonl"
    RecordFile(path).append([_record("a"), _record("b")])
    JsonLines(path).append([_record("b")])  # of a writer that was stopped and replaced
    assert [record["example"] for record in read_records(path, RESULTS_ROWS)] == ["a", "b"]
    JsonLines(path).append([_record("a", score=0.5)])
    with pytest.raises(ResultsError, match=r"rows\.jsonl line 4 repeats line 1"):
        RecordFile(path)


def test_merging_replaces_records_of_the_same_key_only(tmp_path):
    path, kind = tmp_path / "timing.jsonl", RecordKind("timing.jsonl", ["m"], dict)
    merge_records(path, [{"m": "a", "s": 1}, {"m": "b", "s": 2}], kind)
    merge_records(path, [{"m": "b", "s": 3}, {"m": "c", "s": 4}], kind)
    assert list(read_records(path)) == [{"m": "a", "s": 1}, {"m": "b", "s": 3}, {"m": "c", "s": 4}]
    assert [entry.name for entry in tmp_path.iterdir()] == ["timing.jsonl"]


def test_parts_of_several_workers_are_joined_to_the_same_file_twice(tmp_path):
    first, second = RecordParts(tmp_path), RecordParts(tmp_path)
    first.append([_record("a"), _record("b", prompt_digest="x")])
    second.append([_record("b", prompt_digest="x"), _record("c")])  # a rank started twice
    (tmp_path / "rows" / "half.0123abcd.partial").write_bytes(b'{"half": ')  # what a kill leaves
    first.refresh()
    assert first.values.keys() == {key_of(_record(name)) for name in "abc"}
    assert first.digests == {("x", "a"): "0", ("x", "b"): "x", ("x", "c"): "0"}
    rows = tmp_path / "rows.jsonl"
    first.write_whole(rows)
    content = rows.read_bytes()
    assert [record["example"] for record in read_records(rows, RESULTS_ROWS)] == list("abc")
    second.write_whole(rows)
    assert rows.read_bytes() == content
    (tmp_path / "rows" / "a.jsonl").write_bytes(b'{"half": \n')
    with pytest.raises(ResultsError, match=r"rows/a\.jsonl line 1 is damaged"):
        RecordParts(tmp_path)
    (tmp_path / "rows" / "a.jsonl").unlink()
    first.delete_parts()
    second.write_whole(rows)  # the parts are gone, the records are not
    assert rows.read_bytes() == content
    assert RecordParts(tmp_path).values == first.values


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"score": None, "nll": float("nan"), "reply_tokens": 3}, "nll"),
        ({"score": 1.5}, "contradict"), ({"task": "a`b"}, "task"),
        ({"labels": {"turn": "\ud800"}}, "surrogates"),
    ],
)  # fmt: skip
def test_what_would_be_refused_on_reading_is_not_written(changes, named, tmp_path):
    file, parts = RecordFile(tmp_path / "rows.jsonl"), RecordParts(tmp_path / "shared")
    file.append([_record("a")])
    before = file.path.read_bytes()
    for rows in (file, parts):
        with pytest.raises(ResultsError, match=f"cannot hold a record.*{named}"):
            rows.append([_record("b"), _record("c", **changes)])
    with pytest.raises(ResultsError, match="cannot hold a record"):
        merge_records(tmp_path / "rows.jsonl", [_record("c", **changes)], RESULTS_ROWS)
    assert (tmp_path / "rows.jsonl").read_bytes() == before
    assert not [*tmp_path.glob("shared/*/*")]


@pytest.mark.parametrize("kind", [ResultsRow, TimingRow])
def test_the_page_of_formats_says_what_every_field_is(kind):
    page = Path("docs/formats.md").read_text(encoding="utf-8")
    assert not [field for field in kind.__annotations__ if f"`{field}`" not in page]
