"""Whatever happens to a byte on disk: an error that names the file, or the same data."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from kvp.errors import StoreError
from kvp.manifest import read_sealed_json, write_sealed_json
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


def _content(store: Path) -> list[Any]:
    """Everything a reader can tell about a store."""
    reader = TraceReader(store)
    result: list[Any] = [reader.manifest, reader.complete]
    for record in reader.records():
        trace = reader.trace(record.index)
        assert trace.queries is not None
        tensors = (trace.queries, trace.keys, trace.values)
        result += [record, *(tensor.float().numpy().tobytes() for tensor in tensors)]
        result += [tensor.float().numpy().tobytes() for tensor in reader.head(record.index, 1, 1)]
    return result


def _outcome(store: Path) -> tuple[list[Any] | None, str]:
    try:
        return _content(store), ""
    except StoreError as error:
        return None, str(error)


@pytest.mark.parametrize("name", FILES)
def test_flipped_bytes(store: Path, name: str) -> None:
    expected = _content(store)
    path = store / name
    whole = path.read_bytes()
    draw = random.Random(name)
    edges = {*range(min(16, len(whole))), *range(len(whole) - 20, len(whole))}
    noticed = 0
    for position in sorted({*edges, *draw.sample(range(len(whole)), min(60, len(whole)))}):
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
@pytest.mark.parametrize("keep", [0, 1, 0.5, -1])
def test_truncated_files(store: Path, name: str, keep: float) -> None:
    path = store / name
    whole = path.read_bytes()
    size = int(len(whole) * keep) if 0 < keep < 1 else int(keep) % len(whole)
    path.write_bytes(whole[:size])
    result, complaint = _outcome(store)
    if whole[size:].strip():
        assert result is None
        assert str(path) in complaint


@pytest.mark.parametrize("name", [name for name in FILES if not name.startswith("sequences")])
def test_deleted_files(store: Path, name: str) -> None:
    (store / name).unlink()
    with pytest.raises(StoreError, match=name.replace(".", r"\.")):
        _content(store)


def test_a_shard_deleted_under_an_open_reader_is_not_zeros(store: Path) -> None:
    reader = TraceReader(store)
    reader.trace(2)
    (store / "k/c.2.0.0.0.0").unlink()
    with pytest.raises(StoreError, match=r"k/c\.2\.0\.0\.0\.0 is damaged or missing"):
        reader.head(2, 0, 0)


def test_a_deleted_record_is_a_missing_sequence(store: Path, manifest: dict[str, Any]) -> None:
    (store / "sequences/000002.json").unlink()
    assert [record.index for record in TraceReader(store).records()] == [0]
    with TraceWriter.resume(store, manifest) as writer:
        assert writer.missing() == [1, 2]


def test_resuming_notices_damage_too(store: Path, manifest: dict[str, Any]) -> None:
    (store / "v/c.0.0.0.0.0").write_bytes(b"")
    with (
        TraceWriter.resume(store, manifest) as writer,
        pytest.raises(StoreError, match=r"v/c\.0\.0\.0\.0\.0 is damaged.*delete .*000000\.json"),
    ):
        writer.missing()


def test_verify_reads_all_bytes(store: Path) -> None:
    shard = store / "q/c.0.0.0.0.0.0"
    whole = shard.read_bytes()
    shard.write_bytes(bytes([whole[0] ^ 1]) + whole[1:])
    with pytest.raises(StoreError, match=r"q/c\.0.*damaged.*checksum"):
        TraceReader(store).verify()


def test_a_record_of_another_sequence_is_not_believed(store: Path) -> None:
    (store / "sequences/000001.json").write_bytes((store / "sequences/000002.json").read_bytes())
    with pytest.raises(StoreError, match=r"000001\.json belongs to another"):
        TraceReader(store).records()


@pytest.mark.parametrize(
    ("entry", "value", "complaint"),
    [
        ("format_version", 4, "version 4, this kvp reads 3: collect anew"),
        ("format_version", 2, "version 2, this kvp reads 3: collect anew"),
        ("format", "other", "not a trace store"),
        ("plan", {}, "damaged"),
    ],
)
def test_foreign_manifests(store: Path, entry: str, value: object, complaint: str) -> None:
    content = read_sealed_json(store / "manifest.json")
    write_sealed_json(store / "manifest.json", {**content, entry: value})
    with pytest.raises(StoreError, match=complaint):
        TraceReader(store)


def test_not_a_store(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="not a trace store"):
        TraceReader(tmp_path)
    with pytest.raises(StoreError, match="nowhere: no such folder; kvp-collect makes one"):
        TraceReader(tmp_path / "nowhere")
