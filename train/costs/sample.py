"""A small store of random tokens with some of a model's heads, and the seconds of making it."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kvp.geometry import Geometry
from kvp.stopwatch import now
from kvp.store import SequenceRecord, StoreKind, StorePlan, Trace, TraceWriter
from kvp.store.importance_grid import edges_of, label_grids
from kvp.store.schema import DTYPES
from train.costs.plan import GRID

TRAIN, VALIDATION = 3, 2
"""Sequences."""


def write_sample(
    path: Path,
    *,
    geometry: Geometry,
    dtype: str,
    prompt: int,
    answer: int,
    store: StoreKind,
    grid_label: str,
    labels: tuple[str, ...],
    device: torch.device,
) -> tuple[float, float]:
    """Write the store; seconds of a sequence's importance grids (0 without) and of writing it.

    Traces are standard normal, `grid_label` is the label that grids hold at all points.
    """
    grid = store == "importance"
    plan = StorePlan(
        geometry=geometry,
        dtype=dtype,
        max_tokens=prompt + answer,
        sequences=TRAIN + VALIDATION,
        store=store,
        grid=GRID if grid else 0,
        grid_labels=(grid_label,) if grid else (),
        labels=labels,
    )
    frequencies = [1.0] * (geometry.head_dim // 2)
    manifest: dict[str, Any] = {
        "model": {"id": "random"},
        "identity": {},
        "rope_frequencies": frequencies,
    }
    computing, writing = [], []
    with TraceWriter.create_or_resume(str(path), plan, manifest, None) as writer:
        for index in range(plan.sequences):
            trace, seconds = _trace(plan, _record(index, prompt, answer, plan.grid), device)
            computing.append(seconds)
            started = now(device)
            writer.write(trace)
            writing.append(now(device) - started)
    return statistics.median(computing), statistics.median(writing)


def _trace(plan: StorePlan, record: SequenceRecord, device: torch.device) -> tuple[Trace, float]:
    """A sequence of random numbers, and the seconds of its importance grids."""
    size = plan.geometry
    shape = (size.layers, size.kv_heads, record.length, size.head_dim)
    keys, values = (torch.randn(shape).to(DTYPES[plan.dtype][0]) for _ in range(2))
    queries = torch.randn(*shape[:2], size.group, *shape[2:]).to(keys.dtype)
    grids: dict[str, Tensor] = {}
    started = now(device)
    if plan.grid:
        layers = [
            label_grids(q.to(device), k.to(device), record, plan.grid_labels)
            for q, k in zip(queries, keys, strict=True)
        ]
        grids = {name: torch.stack([layer[name] for layer in layers]).cpu() for name in layers[0]}
    seconds = now(device) - started
    trace = Trace(
        record=record,
        queries=queries if plan.store_queries else None,
        keys=keys,
        values=values,
        grids=grids,
        labels={name: torch.rand(*shape[:2], record.prompt_length) for name in plan.labels},
    )
    return trace, seconds


def _record(index: int, prompt: int, answer: int, grid: int) -> SequenceRecord:
    """A sequence with a context, a prompt that is as long, and an answer."""
    tokens = prompt + answer
    edges, common_edges = edges_of(tokens, prompt, prompt, grid) if grid else ((), ())
    return SequenceRecord(
        index=index,
        id=str(index),
        task="random",
        split="train" if index < TRAIN else "validation",
        length=tokens,
        context_length=prompt,
        prompt_length=prompt,
        token_ids=(0,) * tokens,
        reply_spans=((prompt, tokens),),
        edges=edges,
        common_edges=common_edges,
    )
