"""Curves from stores without queries: what an importance grid suffices for."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from eval.config import EvalConfig
from eval.cost_curves import measure_traces
from eval.held_out_traces import open_traces
from eval.methods import build_methods
from eval.prepare import methods_of, trace_settings
from kvp.errors import StoreError
from kvp.geometry import Geometry
from kvp.ops.future_attention import grid_attention
from kvp.store import SequenceRecord, StoreKind, StorePlan, Trace, TraceWriter
from kvp.store.importance_grid import grid_edges, maximum_edges, maximum_grid

GEOMETRY = Geometry(layers=2, query_heads=4, kv_heads=2, head_dim=8)
LENGTH, CONTEXT, PROMPT = 60, 41, 52


def store_of(path: Path, kind: StoreKind) -> str:
    boundaries = (CONTEXT, PROMPT - 1)
    edges = grid_edges(LENGTH, boundaries, 8) if kind == "importance" else ()
    peaks = maximum_edges(edges, boundaries) if edges else ()
    plan = StorePlan(
        geometry=GEOMETRY, dtype="float32", max_tokens=LENGTH, sequences=2,
        store=kind, grid=8 if edges else 0, grid_dtype="float32",
    )  # fmt: skip
    with TraceWriter.create(path / kind, plan, {"identity": {}}) as writer:
        for index in range(2):
            random = torch.Generator().manual_seed(index)
            queries = 3 * torch.randn(2, 2, 2, LENGTH, 8, generator=random)
            keys, values = torch.randn(2, 2, 2, LENGTH, 8, generator=random)
            record = SequenceRecord(
                index=index, id=str(index), task="t", split="test", length=LENGTH,
                context_length=CONTEXT, prompt_length=PROMPT, token_ids=(0,) * LENGTH,
                edges=edges, maximum_edges=peaks,
            )  # fmt: skip
            trace = Trace(
                record=record,
                queries=queries if kind == "qkv" else None,
                keys=keys,
                values=values,
                importance=grid_attention(queries, keys, edges) if edges else None,
                maximum=maximum_grid(queries, keys, (*peaks, LENGTH)) if edges else None,
            )
            writer.write(trace)
    return str(path / kind)


def test_curves_of_a_grid_are_those_of_the_queries(tmp_path: Path) -> None:
    config = EvalConfig(out="unused", methods="knorm,oracle", protection="both", budgets="60%")
    methods = methods_of(config)
    whole, lean = (
        measure_traces(
            trace_settings(config),
            methods,
            open_traces(store_of(tmp_path, kind), GEOMETRY, methods),
        )
        for kind in ("qkv", "importance")
    )  # fmt: skip
    assert len(lean.curves) == len(whole.curves) == 2 * 2 * 2 * 4
    for ours, theirs in zip(lean.curves, whole.curves, strict=True):
        assert (ours["method"], ours["protocol"]) == (theirs["method"], theirs["protocol"])
        assert ours["cost"] == pytest.approx(theirs["cost"], rel=1e-4, abs=1e-6)
    for ours, theirs in zip(lean.kept, whole.kept, strict=True):
        assert ours["kept"] == pytest.approx(theirs["kept"], rel=1e-4)


def test_methods_that_read_queries_are_named(tmp_path: Path) -> None:
    lean = store_of(tmp_path, "importance")
    methods = build_methods(["full", "knorm", "snapkv", "tova"])
    with pytest.raises(StoreError, match=r"no queries, which snapkv, tova read; .* --store qkv"):
        open_traces(lean, GEOMETRY, methods)
    with pytest.raises(StoreError, match=r"--traces .* holds no queries; collect"):
        open_traces(store_of(tmp_path, "kv"), GEOMETRY)
