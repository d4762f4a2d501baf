"""Labels: float32 arrays next to the tensors, one number per prompt token and KV head."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import zarr

from kvp.errors import StoreError
from kvp.store import STORED_LABELS, StorePlan, Trace, TraceReader, TraceWriter, planned_bytes

MakeTrace = Callable[..., Trace]


@pytest.fixture(scope="module")
def labelled(plan: StorePlan) -> StorePlan:
    return replace(plan, labels=STORED_LABELS)


def with_labels(trace: Trace) -> Trace:
    generator = torch.Generator().manual_seed(100 + trace.record.index)
    shape = (2, 2, trace.record.prompt_length)
    return replace(
        trace, labels={name: torch.rand(shape, generator=generator) for name in STORED_LABELS}
    )


@pytest.fixture
def label_store(
    tmp_path: Path, labelled: StorePlan, manifest: dict[str, Any], make_trace: MakeTrace
) -> Path:
    path = tmp_path / "store"
    with TraceWriter.create_or_resume(path, labelled, manifest) as writer:
        for index in (2, 0):
            writer.write(with_labels(make_trace(labelled, index)))
    return path


def test_labels_come_back_bit_for_bit_for_the_prompt_only(
    label_store: Path, labelled: StorePlan, make_trace: MakeTrace
) -> None:
    reader = TraceReader(label_store)
    assert reader.plan == labelled
    reader.verify()
    for index in (0, 2):
        written = with_labels(make_trace(labelled, index))
        for name in STORED_LABELS:
            assert torch.equal(reader.label(name, index), written.labels[name])
            assert torch.equal(reader.trace(index).labels[name], written.labels[name])
    array = zarr.open_array(label_store / "label_kvzip", mode="r")
    assert (array.shape, array.dtype) == ((3, 2, 2, 24), "float32")
    assert torch.from_numpy(array[0])[..., 19:].eq(0).all()  # padding, which no reader returns


def test_resuming_needs_the_same_labels(
    label_store: Path, labelled: StorePlan, manifest: dict[str, Any], make_trace: MakeTrace
) -> None:
    with TraceWriter.create_or_resume(label_store, labelled, manifest) as writer:
        assert writer.missing() == [1]
        writer.write(with_labels(make_trace(labelled, 1)))
    assert TraceReader(label_store).complete
    with pytest.raises(StoreError, match=r"planned differently \(labels: .*kvzip_plus"):
        TraceWriter.create_or_resume(label_store, replace(labelled, labels=("kvzip",)), manifest)


def test_damage_names_the_file(label_store: Path) -> None:
    shard = label_store / "label_kvzip_plus" / "c.2.0.0.0"
    content = bytearray(shard.read_bytes())
    content[20] ^= 1
    shard.write_bytes(content)
    reader = TraceReader(label_store)
    with pytest.raises(StoreError, match=r"label_kvzip_plus/c\.2\.0\.0\.0 is damaged"):
        reader.verify()
    shard.unlink()
    with pytest.raises(StoreError, match=r"label_kvzip_plus/c\.2\.0\.0\.0 is missing"):
        TraceReader(label_store).records()


def test_stores_without_labels_say_so(store: Path, plan: StorePlan) -> None:
    reader = TraceReader(store)
    assert "labels" not in reader.manifest["plan"]  # written as before there were any
    with pytest.raises(StoreError, match=r"holds no label 'kvzip' \(it holds no labels\)"):
        reader.label("kvzip", 0)
    assert StorePlan.from_dict(plan.to_dict()) == plan


def test_traces_and_plans_that_do_not_fit_are_refused(
    tmp_path: Path, labelled: StorePlan, manifest: dict[str, Any], make_trace: MakeTrace
) -> None:
    trace = with_labels(make_trace(labelled, 0))
    whole = torch.zeros(2, 2, trace.record.length)
    nan = torch.full_like(trace.labels["kvzip"], torch.nan)
    with TraceWriter.create_or_resume(tmp_path / "store", labelled, manifest) as writer:
        for labels, message in [
            ({}, "carries the labels of its store"),
            ({**trace.labels, "kvzip": whole}, r"label_kvzip .* \[2, 2, 23\], the store takes"),
            ({**trace.labels, "kvzip": nan}, "is not finite"),
        ]:
            with pytest.raises((ValueError, StoreError), match=message):
                writer.write(replace(trace, labels=labels))
    with pytest.raises(ValueError, match="label 'snap' is none of kvzip, kvzip_plus"):
        replace(labelled, labels=("snap",))


def test_planned_bytes_count_labels(plan: StorePlan) -> None:
    plain = planned_bytes(plan.geometry, dtype="float32", tokens=10)
    assert planned_bytes(plan.geometry, dtype="float32", tokens=10, labels=2) - plain == 10 * 4 * 8
