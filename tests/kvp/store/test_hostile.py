"""Stores that were made to harm: refused in one line before anything is decompressed or run."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numcodecs.blosc
import numpy as np
import pytest
import torch

from kvp.errors import StoreError
from kvp.manifest import read_sealed_json, sha256_file, write_sealed_json
from kvp.store import StorePlan, Trace, TraceReader, TraceWriter

MakeTrace = Callable[..., Trace]


def _reseal(store: Path, **changes: Any) -> None:
    """The manifest again, with the digests of the files as they are now."""
    manifest = read_sealed_json(store / "manifest.json") | changes
    files = {name: sha256_file(store / name) for name in manifest["files"] if name[0] != "/"}
    write_sealed_json(
        store / "manifest.json", {**manifest, "files": {**manifest["files"], **files}}
    )


def _metadata(store: Path, change: Callable[[dict[str, Any]], None]) -> None:
    path = store / "k" / "zarr.json"
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))
    _reseal(store)


def _sharding(content: dict[str, Any]) -> dict[str, Any]:
    inner: dict[str, Any] = content["codecs"][0]["configuration"]
    return inner


@pytest.mark.parametrize(
    "change",
    [
        lambda content: content.update(zarr_format=2),
        lambda content: content.update(fill_value=1),
        lambda content: content.update(shape=[10**9, *content["shape"][1:]]),
        lambda content: content.update(data_type="float64"),
        lambda content: content.update(codecs=[{"name": "bytes"}, {"name": "gzip"}]),
        lambda content: content.update(codecs=[{"name": "numcodecs.pickle"}]),
        lambda content: _sharding(content).update(codecs=[{"name": "bytes"}, {"name": "zstd"}]),
        lambda content: _sharding(content).update(chunk_shape=[1, 2, 2, 24, 4]),
    ],
    ids=["version", "fill", "shape", "type", "gzip", "pickle", "zstd", "chunks"],
)
def test_metadata_must_be_what_the_plan_says(
    store: Path, change: Callable[[dict[str, Any]], None]
) -> None:
    _metadata(store, change)
    with pytest.raises(StoreError, match=r"k/zarr\.json is not what"):
        TraceReader(store)


def test_an_array_of_the_older_zarr_format_is_never_opened(store: Path) -> None:
    """Its filters may unpickle what the chunks hold."""
    metadata = {
        "zarr_format": 2, "shape": [3, 2, 2, 24, 4], "chunks": [1, 2, 2, 24, 4], "dtype": "|O",
        "compressor": None, "fill_value": None, "order": "C", "filters": [{"id": "pickle"}],
    }  # fmt: skip
    (store / "k" / ".zarray").write_text(json.dumps(metadata))
    assert TraceReader(store).trace(0).keys.dtype == torch.bfloat16, "it reads the other one"
    (store / "k" / "zarr.json").unlink()
    manifest = read_sealed_json(store / "manifest.json")
    files = {name: digest for name, digest in manifest["files"].items() if name[0] != "k"}
    files["k/.zarray"] = sha256_file(store / "k" / ".zarray")
    write_sealed_json(store / "manifest.json", {**manifest, "files": files})
    with pytest.raises(StoreError, match="does not list the files of its plan"):
        TraceReader(store)


def test_a_chunk_that_expands_beyond_its_plan_is_not_expanded(store: Path) -> None:
    """A Blosc frame of 300 kB decompresses to 64 MB of zeros."""
    frame = numcodecs.blosc.compress(np.zeros(2**26, np.uint8), b"zstd", 9)
    assert len(frame) < 2**20
    index = np.array([[0, len(frame)]] * 4, "<u8").tobytes()
    shard = store / "k" / "c.0.0.0.0.0"
    shard.write_bytes(frame + index + b"0000")
    record = store / "sequences" / "000000.json"
    content = read_sealed_json(record)
    content["shards"]["k"] = {"bytes": shard.stat().st_size, "sha256": sha256_file(shard)}
    write_sealed_json(record, content)
    reader = TraceReader(store)
    with pytest.raises(StoreError, match="does not expand to the 192 bytes of its plan"):
        reader.kv(0)


@pytest.mark.parametrize("data", [b"", b"short", b"\xff" * 4096])
def test_shards_without_an_index_are_refused(store: Path, data: bytes) -> None:
    shard = store / "k" / "c.0.0.0.0.0"
    shard.write_bytes(data)
    record = store / "sequences" / "000000.json"
    content = read_sealed_json(record)
    content["shards"]["k"] = {"bytes": len(data), "sha256": sha256_file(shard)}
    write_sealed_json(record, content)
    with pytest.raises(StoreError, match=r"c\.0\.0\.0\.0\.0 is damaged"):
        TraceReader(store).kv(0)


@pytest.mark.parametrize("name", ["/dev/zero", "../../etc/passwd"])
def test_a_manifest_lists_the_files_of_its_plan_and_no_others(store: Path, name: str) -> None:
    manifest = read_sealed_json(store / "manifest.json")
    files = {**manifest["files"], name: "00"}
    write_sealed_json(store / "manifest.json", {**manifest, "files": files})
    with pytest.raises(StoreError, match="does not list the files of its plan"):
        TraceReader(store)


def test_links_to_devices_are_no_files(store: Path) -> None:
    (store / "zarr.json").unlink()
    (store / "zarr.json").symlink_to("/dev/zero")
    with pytest.raises(StoreError, match=r"zarr\.json is missing"):
        TraceReader(store)
    (store / "zarr.json").unlink()
    os.mkfifo(store / "zarr.json")
    with pytest.raises(StoreError, match=r"zarr\.json is missing"):
        TraceReader(store)


def test_a_plan_of_a_billion_layers_is_refused_at_once(store: Path) -> None:
    plan = read_sealed_json(store / "manifest.json")["plan"]
    _reseal(store, plan={**plan, "geometry": {**plan["geometry"], "layers": 10**9}})
    with pytest.raises(StoreError, match=r"zarr\.json is not what its plan says"):
        TraceReader(store)


def test_copies_of_records_are_not_sequences(store: Path) -> None:
    record = store / "sequences" / "000000.json"
    (record.parent / "000000 (copy).json").write_bytes(record.read_bytes())
    (record.parent / "000001.json~").write_bytes(record.read_bytes())
    assert [record.index for record in TraceReader(store).records()] == [0, 2]


def test_a_record_beyond_the_plan_is_named(store: Path) -> None:
    record = store / "sequences" / "000000.json"
    (record.parent / "000007.json").write_bytes(record.read_bytes())
    with pytest.raises(StoreError, match=r"000007\.json belongs to another store or sequence"):
        TraceReader(store).records()


@pytest.mark.parametrize("tensor", ["queries", "keys", "values"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_tensors_that_are_not_finite_are_not_written(
    tensor: str, value: float, store: Path, plan: StorePlan, manifest: dict[str, Any],
    make_trace: MakeTrace,
) -> None:  # fmt: skip
    trace = make_trace(plan, 1)
    damaged = getattr(trace, tensor).clone()
    damaged[1, 0, ..., 3, 2] = value
    with TraceWriter.resume(store, manifest) as writer:
        with pytest.raises(StoreError, match=r"sequence 1 \(sample-1\) is not finite in layer 1"):
            writer.write(replace(trace, **{tensor: damaged}))
        assert writer.missing() == [1]
