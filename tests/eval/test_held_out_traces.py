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
from kvp.store import SequenceRecord, StoreKind, StorePlan, Trace, TraceWriter
from kvp.store.importance_grid import edges_of, label_grids

GEOMETRY = Geometry(layers=2, query_heads=4, kv_heads=2, head_dim=8)
LENGTH, CONTEXT, PROMPT = 60, 41, 52


def store_of(path: Path, kind: StoreKind, *labels: str) -> str:
    gridded = kind == "importance"
    edges, common = edges_of(LENGTH, CONTEXT, PROMPT, 8) if gridded else ((), ())
    plan = StorePlan(
        geometry=GEOMETRY, dtype="float32", max_tokens=LENGTH, sequences=2,
        store=kind, grid=8 if gridded else 0, grid_dtype="float32", grid_labels=labels[:gridded],
    )  # fmt: skip
    with TraceWriter.create_or_resume(path / kind, plan, {"identity": {}}) as writer:
        for index in range(2):
            random = torch.Generator().manual_seed(index)
            queries = 3 * torch.randn(2, 2, 2, LENGTH, 8, generator=random)
            keys, values = torch.randn(2, 2, 2, LENGTH, 8, generator=random)
            record = SequenceRecord(
                index=index, id=str(index), task="t", split="test", length=LENGTH,
                context_length=CONTEXT, prompt_length=PROMPT, token_ids=(0,) * LENGTH,
                edges=edges, common_edges=common,
            )  # fmt: skip
            trace = Trace(
                record=record,
                queries=queries if kind == "qkv" else None,
                keys=keys,
                values=values,
                grids=label_grids(queries, keys, record, labels) if gridded else {},
            )
            writer.write(trace)
    return str(path / kind)


@pytest.mark.parametrize("label", ["future_attention", "max_reply_attention"])
def test_curves_of_a_grid_are_those_of_the_queries(tmp_path: Path, label: str) -> None:
    config = EvalConfig(out="unused", methods="knorm,oracle", protection="both", budgets="60%")
    methods = methods_of(config)
    whole, lean = (
        measure_traces(
            trace_settings(config),
            methods,
            open_traces(store_of(tmp_path, kind, label), GEOMETRY, methods),
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
    lean = store_of(tmp_path, "importance", "max_reply_attention")
    methods = build_methods(["full", "knorm", "snapkv", "tova"])
    with pytest.raises(StoreError, match=r"no queries, which snapkv, tova read; .* --store qkv"):
        open_traces(lean, GEOMETRY, methods)
    with pytest.raises(StoreError, match=r"--traces .* holds no queries; collect"):
        open_traces(store_of(tmp_path, "kv"), GEOMETRY)
