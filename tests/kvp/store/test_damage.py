"""Whatever happens to a byte on disk: an error that names the file, or the same data."""

import random

import pytest

from kvp.artifacts.manifest import read_sealed_json, write_sealed_json
from kvp.errors import StoreError
from kvp.store import TraceReader, TraceWriter

FILES = [
    "manifest.json",
    "q/zarr.json",
    "k/zarr.json",
    "v/zarr.json",
    "sequences/000002.json",
    "q/c.2.0.0.0.0.0",
    "k/c.2.0.0.0.0",
    "v/c.0.0.0.0.0",
]


def _content(store):
    """Everything a reader can tell about a store."""
    reader = TraceReader(store)
    result = [reader.manifest, reader.complete]
    for record in reader.records():
        trace = reader.trace(record.index)
        tensors = (trace.queries, trace.keys, trace.values)
        result += [record, *(tensor.float().numpy().tobytes() for tensor in tensors)]
    return result


def _outcome(store):
    try:
        return _content(store), ""
    except StoreError as error:
        return None, str(error)


@pytest.mark.parametrize("name", FILES)
def test_flipped_bytes(store, name):
    expected = _content(store)
    path = store / name
    whole = path.read_bytes()
    draw = random.Random(name)
    edges = {*range(min(16, len(whole))), *range(len(whole) - 20, len(whole))}
    noticed = 0
    for position in sorted({*edges, *draw.sample(range(len(whole)), min(30, len(whole)))}):
        changed = whole[position] ^ (1 << draw.randrange(8))
        path.write_bytes(whole[:position] + bytes([changed]) + whole[position + 1 :])
        result, complaint = _outcome(store)
        if result is None:
            noticed += 1
            assert str(path) in complaint, complaint
            assert "\n" not in complaint
        else:
            assert result == expected, f"byte {position} of {name} changed what is read"
    assert noticed > 20
    path.write_bytes(whole)
    assert _content(store) == expected


@pytest.mark.parametrize("name", FILES)
def test_truncated_and_deleted_files(store, name):
    path = store / name
    whole = path.read_bytes()
    for size in (0, len(whole) // 2, len(whole) - 2):
        path.write_bytes(whole[:size])
        result, complaint = _outcome(store)
        if whole[size:].strip():
            assert result is None
            assert str(path) in complaint
    if not name.startswith("sequences"):
        path.unlink()
        assert name in _outcome(store)[1]


def test_a_shard_deleted_under_an_open_reader_is_not_zeros(store):
    reader = TraceReader(store)
    with pytest.raises(StoreError, match="no sequence 1"):
        reader.trace(1)
    reader.trace(2)
    (store / "k/c.2.0.0.0.0").unlink()
    with pytest.raises(
        StoreError, match=r"k/c\.2\.0\.0\.0\.0 is damaged or missing .*delete .*000002\.json"
    ):
        reader.kv(2)


def test_a_deleted_record_is_a_missing_sequence(store, plan, manifest):
    (store / "sequences/000002.json").unlink()
    assert [record.index for record in TraceReader(store).records()] == [0]
    with TraceWriter.create_or_resume(store, plan, manifest) as writer:
        assert writer.missing() == [1, 2]


def test_copies_of_records_are_not_sequences(store):
    record = (store / "sequences/000002.json").read_bytes()
    (store / "sequences/000002 (copy).json").write_bytes(record)
    assert [record.index for record in TraceReader(store).records()] == [0, 2]
    for name in ("000001", "000007"):
        (store / f"sequences/{name}.json").write_bytes(record)
        with pytest.raises(StoreError, match=rf"{name}\.json belongs to another"):
            TraceReader(store).records()
        (store / f"sequences/{name}.json").unlink()


def test_not_a_store(store, tmp_path):
    with pytest.raises(StoreError, match="not a trace store"):
        TraceReader(tmp_path)
    with pytest.raises(StoreError, match="nowhere: no such folder; kvp collect makes one"):
        TraceReader(tmp_path / "nowhere")
    content = read_sealed_json(store / "manifest.json")
    write_sealed_json(store / "manifest.json", {**content, "format_version": 2})
    with pytest.raises(StoreError, match="version 2, this kvp reads 3"):
        TraceReader(store)
