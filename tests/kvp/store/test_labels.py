"""Labels, one number per prompt token and KV head; readers of some heads."""

import pickle
from dataclasses import replace

import pytest
import torch
import zarr

from kvp.errors import StoreError
from kvp.store import StorePlan, TraceReader, TraceWriter
from kvp.training_names import STORED_LABELS


@pytest.fixture(scope="module")
def labelled(plan):
    return replace(plan, labels=STORED_LABELS)


def with_labels(trace):
    generator = torch.Generator().manual_seed(100 + trace.record.index)
    shape = (2, 2, trace.record.prompt_length)
    return replace(
        trace, labels={name: torch.rand(shape, generator=generator) for name in STORED_LABELS}
    )


@pytest.fixture
def label_store(tmp_path, labelled, manifest, make_trace):
    path = tmp_path / "store"
    with TraceWriter.create_or_resume(path, labelled, manifest) as writer:
        for index in (2, 0):
            writer.write(with_labels(make_trace(labelled, index)))
    return path


def test_labels_come_back_bit_for_bit_for_the_prompt_only(label_store, labelled, make_trace):
    reader = TraceReader(label_store)
    assert reader.plan == labelled
    for index in (0, 2):
        written = with_labels(make_trace(labelled, index))
        for name in STORED_LABELS:
            assert torch.equal(reader.label(name, index), written.labels[name])
            assert torch.equal(reader.trace(index).labels[name], written.labels[name])
    part = TraceReader(label_store, heads=slice(1, 3)).label("kvzip", 0)
    assert torch.equal(part, reader.label("kvzip", 0).flatten(0, 1)[1:3][None])
    array = zarr.open_array(label_store / "label_kvzip", mode="r")
    assert (array.shape, array.dtype) == ((3, 2, 2, 24), "float32")
    assert torch.from_numpy(array[0])[..., 19:].eq(0).all()  # padding, which no reader returns


def test_stores_without_labels_say_so(store, plan):
    with pytest.raises(StoreError, match=r"holds no label 'kvzip' \(it holds no labels\)"):
        TraceReader(store).label("kvzip", 0)
    assert StorePlan.from_dict(plan.to_dict()) == plan


def test_traces_and_plans_that_do_not_fit_are_refused(tmp_path, labelled, manifest, make_trace):
    trace = with_labels(make_trace(labelled, 0))
    whole = torch.zeros(2, 2, trace.record.length)
    nan = torch.full_like(trace.labels["kvzip"], torch.nan)
    with TraceWriter.create_or_resume(tmp_path / "store", labelled, manifest) as writer:
        for labels, message in [
            ({}, "carries what its store keeps"),
            ({**trace.labels, "kvzip": whole}, r"label_kvzip .* \[2, 2, 23\], the store takes"),
            ({**trace.labels, "kvzip": nan}, "is not finite"),
        ]:
            with pytest.raises((ValueError, StoreError), match=message):
                writer.write(replace(trace, labels=labels))


@pytest.mark.parametrize("heads", [slice(0, 1), slice(1, 3), slice(2, 4), slice(0, 4)])
def test_tensors_are_those_of_the_heads(heads, store):
    whole, part = TraceReader(store), TraceReader(store, heads=heads)
    part = pickle.loads(pickle.dumps(part))
    assert part.geometry == whole.geometry
    for ours, theirs in zip(part.kv(2), whole.kv(2), strict=True):
        assert torch.equal(ours, theirs.flatten(0, 1)[heads][None])
    queries, everything = part.trace(0).queries, whole.trace(0).queries
    assert torch.equal(queries, everything.flatten(0, 1)[heads][None])
