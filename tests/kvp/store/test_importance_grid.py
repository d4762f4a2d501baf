"""Importance grids: labels at their cuts against float64, query by query; what is refused."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
import zarr
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from kvp.errors import StoreError
from kvp.geometry import Geometry
from kvp.store import (
    GRIDS,
    SequenceRecord,
    StorePlan,
    Trace,
    TraceReader,
    TraceWriter,
    planned_bytes,
)  # fmt: skip
from kvp.store.importance_grid import (
    common_edges,
    decode,
    edges_of,
    encode,
    grid_edges,
    importance_at,
    intervals_between,
    label_grids,
    root_scale,
)

MakeTrace = Callable[..., Trace]
QWEN = Geometry(layers=28, query_heads=28, kv_heads=4, head_dim=128)
TOLERANCE = {"float32": 1e-5, "float16": 1e-3}
"""Largest relative error of any label, however small."""

TOKENS, CONTEXT, PROMPT = 120, 83, 101
REPLIES = ((31, 40), (PROMPT, 113))
BOTH = ("future_attention", "max_reply_attention")


def peaked(
    grid_dtype: Literal["float32", "float16"], labels: tuple[str, ...] = BOTH
) -> tuple[StorePlan, Trace, torch.Tensor]:
    """A trace whose attention spans many orders of magnitude, with its queries apart."""
    geometry = Geometry(layers=1, query_heads=4, kv_heads=2, head_dim=8)
    plan = StorePlan(
        geometry=geometry, dtype="float32", max_tokens=128, sequences=1, store="importance",
        grid=12, grid_dtype=grid_dtype, grid_labels=labels,
    )  # fmt: skip
    random = torch.Generator().manual_seed(5)
    queries = 3 * torch.randn(1, 2, 2, TOKENS, 8, generator=random)
    queries[..., 0] += 12  # some tokens have little importance for all of them
    keys, values = torch.randn(2, 1, 2, TOKENS, 8, generator=random)
    edges, common = edges_of(TOKENS, CONTEXT, PROMPT, plan.grid)
    record = SequenceRecord(
        index=0, id="s", task="t", split="train", length=TOKENS, context_length=CONTEXT,
        prompt_length=PROMPT, token_ids=(1,) * TOKENS, reply_spans=REPLIES, edges=edges,
        common_edges=common,
    )  # fmt: skip
    trace = Trace(
        record=record,
        queries=None,
        keys=keys,
        values=values,
        grids=label_grids(queries, keys, record, labels),
    )
    return plan, trace, queries


def attention(trace: Trace, queries: torch.Tensor, head: int) -> NDArray[np.float64]:
    """[T, T] float64: what every query pays every key, the larger of the group's two heads."""
    keys = trace.keys[0, head].double().numpy()
    paid = np.zeros((TOKENS, TOKENS))
    for query in range(TOKENS):
        for row in queries[0, head, :, query].double().numpy():
            logits = keys[: query + 1] @ row / np.sqrt(8)
            weights = np.exp(logits - logits.max())
            paid[query, : query + 1] = np.maximum(paid[query, : query + 1], weights / weights.sum())
    return paid


def by_hand(label: str, paid: NDArray[np.float64], point: int, stop: int) -> NDArray[np.float64]:
    """A label [point] from [T, T] attention, query by query."""
    future = paid[point:stop, :point]
    if label == "future_attention":
        return np.asarray(future.sum(0))
    if label == "max_reply_attention":
        writes = [any(a - 1 <= j < b for a, b in REPLIES) for j in range(point, stop)]
        future = future * np.where(writes, 1, 0.2 if any(writes) else 1)[:, None]
    return np.asarray(future.max(0))


@pytest.mark.parametrize("labels", [BOTH, ("max_future_attention",)])
@pytest.mark.parametrize("grid_dtype", ["float32", "float16"])
def test_labels_are_those_of_the_queries_at_every_point(
    tmp_path: Path, grid_dtype: Literal["float32", "float16"], labels: tuple[str, ...]
) -> None:
    plan, trace, queries = peaked(grid_dtype, labels)
    with TraceWriter.create_or_resume(tmp_path / "s", plan, {"identity": {}}) as writer:
        writer.write(trace)
    reader = TraceReader(tmp_path / "s")
    assert reader.record(0) == trace.record
    assert {CONTEXT, PROMPT - 1} <= set(trace.record.edges)
    allowed, smallest = TOLERANCE[grid_dtype], 1.0
    for head, label in itertools.product(range(2), GRIDS):
        edges = plan.edges_of(label, trace.record)
        assert edges == (
            trace.record.edges if label in labels else (*trace.record.common_edges, 120)
        )
        paid = attention(trace, queries, head)
        for point, stop in itertools.combinations(edges, 2):
            importance = reader.importance(label, 0, point, stop)[0, head].double().numpy()
            expected = by_hand(label, paid, point, stop)
            np.testing.assert_allclose(importance, expected, rtol=allowed)
            smallest = min(smallest, expected.min())
        for point in edges[:-1]:
            whole = importance_at(reader.trace(0), label, point)
            assert torch.equal(whole, reader.importance(label, 0, point))
    assert smallest < 1e-7  # the tolerance held for small labels, too
    edges = trace.record.edges
    for label in labels:
        assert reader.importance(label, 0, edges[2], edges[5] - 1).equal(
            reader.importance(label, 0, edges[2], edges[5])
        )


def test_plain_zarr_reads_a_grid(tmp_path: Path) -> None:
    plan, trace, _ = peaked("float16")
    with TraceWriter.create_or_resume(tmp_path / "s", plan, {"identity": {}}) as writer:
        writer.write(trace)
    assert not (tmp_path / "s" / "q").exists()
    array = zarr.open_array(tmp_path / "s" / "importance", mode="r")
    assert (array.shape, array.dtype, array.chunks) == (
        (1, 1, 2, 12, 128), "float16", (1, 1, 1, 12, 128)
    )  # fmt: skip
    stored = np.asarray(array[0, 0, 1], dtype=np.float64) / array.attrs["kvp_root_scale"]
    np.testing.assert_allclose(
        stored[:, :TOKENS] ** 2, trace.grids["future_attention"][0, 1].double().numpy(), rtol=1e-3
    )
    assert not stored[:, TOKENS:].any()


@given(st.integers(2, 600), st.integers(0, 700), st.integers(0, 700), st.integers(2, 60))
def test_edges_rise_to_the_end_and_hold_the_boundaries(
    length: int, one: int, other: int, cuts: int
) -> None:
    edges = grid_edges(length, (one, other), cuts)
    assert list(edges) == sorted(set(edges))
    assert edges[0] > 0
    assert edges[-1] == length
    assert len(edges) - 1 == min(cuts, length - 1)
    inside = {boundary for boundary in (one, other) if 0 < boundary < length}
    assert inside <= set(edges)
    peaks = common_edges(edges, (one, other))
    assert inside | {edges[-2]} <= set(peaks) <= set(edges[:-1])
    assert len(peaks) <= 4


def test_edges_of_one_sequence() -> None:
    # ten cuts of 110 tokens lie at 10, 20, ..., 100; 83 replaces 80 and 99 replaces 100
    assert grid_edges(110, (99, 83), 10) == (10, 20, 30, 40, 50, 60, 70, 83, 90, 99, 110)
    assert common_edges((10, 20, 30, 40, 50, 60, 70, 83, 90, 99, 110), (99, 83)) == (50, 83, 99)
    assert grid_edges(5, (3, 4), 48) == (1, 2, 3, 4, 5)
    assert grid_edges(110, (81, 82), 2) == (81, 82, 110)


def test_rows_of_a_window() -> None:
    edges = (10, 20, 30, 40)
    assert intervals_between(edges, 10, 40) == slice(0, 3)
    assert intervals_between(edges, 20, 30) == slice(1, 2)
    assert intervals_between(edges, 20, 31) == slice(1, 3)
    assert intervals_between(edges, 30, 99) == slice(2, 3)
    with pytest.raises(ValueError, match="15 is no compression point"):
        intervals_between(edges, 15, 40)
    with pytest.raises(ValueError, match="40 is no compression point"):
        intervals_between(edges, 40, 40)


@pytest.mark.parametrize("tokens", [1, 24, 4096, 4500, 10**6])
def test_float16_keeps_small_values_and_does_not_overflow(tokens: int) -> None:
    values = tokens * torch.logspace(-17, 0, 5000, dtype=torch.float64).float()
    scale = root_scale(tokens)
    stored = encode(values, torch.float16, scale)
    assert np.log2(scale) % 1 == 0
    assert stored.isfinite().all()
    torch.testing.assert_close(decode(stored, scale), values, rtol=9.8e-4, atol=0)
    assert decode(encode(torch.zeros(3), torch.float16, scale), scale).eq(0).all()


def test_bytes_of_the_papers_model() -> None:
    whole = planned_bytes(QWEN, dtype="bfloat16", tokens=4500)
    lean = planned_bytes(QWEN, dtype="bfloat16", tokens=4500, store="importance", grid=48)
    # of 9 x 128 x 2 bytes per token and head stay 2 x 128 x 2, and come (48 + 4 + 4) x 2
    assert lean / whole == pytest.approx((512 + 112) / 2304)
    assert lean / whole <= 0.28
    exact = planned_bytes(
        QWEN, dtype="bfloat16", tokens=1, store="importance", grid=48, grid_dtype="float32"
    )
    assert exact == 28 * 4 * (512 + 224)


def test_files_of_a_store_of_the_papers_shape(tmp_path: Path) -> None:
    """What the disk holds of one layer of 7B shapes: random numbers, shorter sequences."""
    size = Geometry(layers=1, query_heads=28, kv_heads=4, head_dim=128)
    plan = StorePlan(geometry=size, dtype="bfloat16", max_tokens=512, sequences=1)
    lean = replace(plan, store="importance", grid=48, grid_labels=("max_reply_attention",))
    queries, keys, values = (
        torch.randn(
            1, 4, *group, 512, 128, generator=torch.Generator().manual_seed(seed)
        ).bfloat16()
        for seed, group in enumerate([(7,), (), ()])
    )
    edges, common = edges_of(512, 450, 480, 48)
    record = SequenceRecord(
        index=0, id="s", task="t", split="train", length=512, context_length=450,
        prompt_length=480, token_ids=(1,) * 512, reply_spans=((480, 512),), edges=edges,
        common_edges=common,
    )  # fmt: skip
    plain = replace(record, edges=(), common_edges=())
    grids = label_grids(queries, keys, record, lean.grid_labels)
    for store, trace in (
        (plan, Trace(record=plain, queries=queries, keys=keys, values=values)),
        (lean, Trace(record=record, queries=None, keys=keys, values=values, grids=grids)),
    ):
        with TraceWriter.create_or_resume(
            tmp_path / store.store, store, {"identity": {}}
        ) as writer:
            writer.write(trace)
    whole, part = (
        sum(file.stat().st_size for file in (tmp_path / kind).rglob("c.*"))
        for kind in ("qkv", "importance")
    )
    assert 2 / 9 < part / whole <= 0.3


def test_what_a_grid_cannot_answer_is_one_line(tmp_path: Path, store: Path) -> None:
    plan, trace, _ = peaked("float16")
    with TraceWriter.create_or_resume(tmp_path / "s", plan, {"identity": {}}) as writer:
        writer.write(trace)
    reader = TraceReader(tmp_path / "s")
    with pytest.raises(StoreError, match=r"no future_attention of sequence 0 at 84 .* only at"):
        reader.importance("future_attention", 0, 84)
    with pytest.raises(
        StoreError, match=r"no max_future_attention of sequence 0 at 9 .* --store qkv"
    ):
        reader.importance("max_future_attention", 0, trace.record.edges[0])
    with pytest.raises(StoreError, match=r"holds no my:LABEL, only future_attention, .* qkv"):
        reader.importance("my:LABEL", 0, CONTEXT)
    with pytest.raises(StoreError, match="without queries"):
        reader.head(0, 0, 0)
    with pytest.raises(StoreError, match="without an importance grid"):
        TraceReader(store).importance("future_attention", 0, 10)


def test_damage_names_the_file(tmp_path: Path) -> None:
    plan, trace, _ = peaked("float16")
    with TraceWriter.create_or_resume(tmp_path / "s", plan, {"identity": {}}) as writer:
        writer.write(trace)
    shard = tmp_path / "s" / "importance" / "c.0.0.0.0.0"
    content = bytearray(shard.read_bytes())
    content[40] ^= 1
    shard.write_bytes(content)
    with pytest.raises(StoreError, match=r"importance/c\.0\.0\.0\.0\.0 is damaged"):
        TraceReader(tmp_path / "s").importance("future_attention", 0, CONTEXT)
    shard.unlink()
    with pytest.raises(StoreError, match=r"importance/c\.0\.0\.0\.0\.0 is missing"):
        TraceReader(tmp_path / "s").records()


def test_traces_and_plans_that_do_not_fit_are_refused(
    tmp_path: Path, plan: StorePlan, manifest: dict[str, Any], make_trace: MakeTrace
) -> None:
    lean = replace(plan, store="importance", grid=6, grid_labels=("max_reply_attention",))
    trace = make_trace(lean, 0)
    peaks = trace.grids["max_reply_attention"]

    def with_peaks(grid: torch.Tensor) -> dict[str, torch.Tensor]:
        return {**trace.grids, "max_reply_attention": grid}

    plain = replace(trace.record, edges=(), common_edges=())
    with TraceWriter.create_or_resume(tmp_path / "store", lean, manifest) as writer:
        for changes, message in [
            ({"grids": {}}, "carries what its store keeps"),
            ({"record": plain}, "0 edges for 6 compression points"),
            ({"grids": with_peaks(peaks[..., 1:, :])}, r"reply_peak .* the store takes"),
            ({"grids": with_peaks(peaks.half())}, r"reply_peak .* the store takes float32"),
            ({"grids": with_peaks(peaks + torch.inf)}, "reply_peak .* is not finite"),
        ]:
            with pytest.raises((ValueError, StoreError), match=message):
                writer.write(replace(trace, **changes))
        writer.write(trace)
    with pytest.raises(StoreError, match=r"planned differently \(.*grid"):
        TraceWriter.create_or_resume(tmp_path / "store", replace(lean, grid=7), manifest)
    for settings in (
        {"store": "q"}, {"grid": 4}, {"store": "importance"}, {"grid_dtype": "int8"},
        {"grid_labels": ("future_attention",)},
        {"store": "importance", "grid": 4, "grid_labels": ("kvzip",)},
    ):  # fmt: skip
        with pytest.raises(ValueError, match="grid"):
            replace(plan, **settings)
    for edges in ((3, 2, 23), (0, 23), (4, 22)):
        with pytest.raises(ValueError, match="do not rise to 23"):
            replace(trace.record, edges=edges, common_edges=())
    with pytest.raises(ValueError, match="no points of the grid"):
        replace(trace.record, common_edges=(trace.record.length,))
