"""Stores that are not what their plan says, and tensors that no store should hold."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvp.errors import StoreError
from kvp.manifest import read_sealed_json, write_sealed_json
from kvp.store import StorePlan, Trace, TraceReader, TraceWriter

MakeTrace = Callable[..., Trace]


def _metadata(store: Path, change: Callable[[dict[str, Any]], None]) -> None:
    path = store / "k" / "zarr.json"
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


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


def test_a_plan_of_a_billion_layers_is_refused_at_once(store: Path) -> None:
    manifest = read_sealed_json(store / "manifest.json")
    plan = manifest["plan"]
    plan = {**plan, "geometry": {**plan["geometry"], "layers": 10**9}}
    write_sealed_json(store / "manifest.json", {**manifest, "plan": plan})
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
