from dataclasses import replace

import numpy as np
import pytest
import torch
import zarr

from kvp.errors import StoreError
from kvp.geometry import Geometry
from kvp.store import SequenceRecord, StorePlan, TraceReader, TraceWriter, planned_bytes

QWEN = Geometry(layers=28, query_heads=28, kv_heads=4, head_dim=128)


def _same_bits(left, right):
    bits = {2: torch.int16, 4: torch.int32}[left.element_size()]
    return left.dtype == right.dtype and torch.equal(left.view(bits), right.view(bits))


def test_records_are_those_committed(store, plan, make_trace):
    reader = TraceReader(store)
    assert [record.index for record in reader.records()] == [0, 2]
    assert [record.index for record in reader.records("train")] == [0, 2]
    assert reader.records("validation") == ()
    assert not reader.complete
    with TraceWriter.create_or_resume(store, plan, reader.manifest) as writer:
        assert writer.missing() == [1]
        writer.write(make_trace(plan, 1))
        assert writer.missing() == []
    assert reader.complete
    assert [record.index for record in reader.records("validation")] == [1]
    assert reader.geometry == plan.geometry
    assert reader.plan == plan
    assert reader.manifest["note"] == "test"
    assert repr(reader) == f"TraceReader({str(store)!r}: 3 of 3 sequences, {plan.geometry})"
    assert "token_ids" not in repr(reader.record(0)), "hundreds of numbers"


@pytest.mark.parametrize(
    ("dtype", "bits"),
    [
        ("bfloat16", np.arange(2**16).astype(np.uint16)),
        ("float16", np.arange(2**16).astype(np.uint16)),
        ("float32", np.random.default_rng(0).integers(0, 2**32, 2**16, dtype=np.uint32)),
    ],
)
def test_every_bit_pattern_survives(tmp_path, dtype, bits, make_trace):
    geometry = Geometry(layers=2, query_heads=2, kv_heads=2, head_dim=16)
    plan = StorePlan(geometry=geometry, dtype=dtype, max_tokens=1030, sequences=2)
    template = make_trace(replace(plan, max_tokens=1025), 0)
    keys = torch.from_numpy(bits).view(getattr(torch, dtype)).reshape(2, 2, 1024, 16)
    keys = keys.where(keys.isfinite(), -1.0)  # others are refused (test_damage.py)
    zeros = torch.zeros_like(keys)
    trace = replace(template, keys=keys, values=-zeros, queries=zeros.unsqueeze(2))
    with TraceWriter.create_or_resume(tmp_path / "s", plan, {"identity": {}}) as writer:
        writer.write(trace)
    reader = TraceReader(tmp_path / "s")
    read = reader.trace(0)
    assert read.record == trace.record
    assert all(map(_same_bits, reader.kv(0), (keys, -zeros)))
    assert _same_bits(read.keys, keys)
    assert _same_bits(read.values, -zeros)  # negative zeros everywhere, which zarr takes for empty
    assert _same_bits(read.queries, zeros.unsqueeze(2))


def test_a_store_without_queries_is_refused(tmp_path, plan):
    with pytest.raises(StoreError, match="no store holds such arrays"):
        TraceWriter.create_or_resume(tmp_path / "s", replace(plan, store="kv"), {"identity": {}})


def test_plain_zarr_reads_it(store, plan, make_trace):
    group = zarr.open_group(store, mode="r")
    queries = group["q"]
    assert queries.shape == (3, 2, 2, 2, 24, 4)
    assert queries.attrs["kvp_dtype"] == "bfloat16"
    expected = make_trace(plan, 2).queries
    stored = np.asarray(queries[2, 1, 0, 1, :21])
    np.testing.assert_array_equal(stored, expected[1, 0, 1].view(torch.uint16).numpy())


def test_size_announcement_counts_the_paper_model():
    # 28 layers x (28 + 4 + 4) heads x 128 values x 2 bytes
    assert planned_bytes(QWEN, dtype="bfloat16", tokens=1) == 258_048
    assert planned_bytes(QWEN, dtype="bfloat16", tokens=10, labels=2) == 2_589_440
    assert planned_bytes(QWEN, dtype="float32", tokens=1) == 516_096


@pytest.mark.parametrize(
    ("field", "value", "complaint"),
    [
        ("length", 5, "ids for 5 tokens"),
        ("context_length", 0, "boundaries"),
        ("context_length", 22, "boundaries"),
        ("prompt_length", 99, "boundaries"),
    ],
)
def test_contradictory_records_are_refused(plan, make_trace, field, value, complaint):
    record = make_trace(plan, 0).record
    with pytest.raises(ValueError, match=complaint):
        replace(record, **{field: value})
    assert SequenceRecord.from_dict(record.to_dict()) == record


def test_the_output_projection_is_kept(tmp_path, plan, manifest):
    gram = torch.rand(2, 2, 4, 4, generator=torch.Generator().manual_seed(0))
    TraceWriter.create_or_resume(tmp_path / "store", plan, manifest, gram).close()
    assert torch.equal(TraceReader(tmp_path / "store").output_gram(), gram)
    part = TraceReader(tmp_path / "store", heads=slice(1, 3)).output_gram()
    assert torch.equal(part, gram.flatten(0, 1)[1:3][None])
