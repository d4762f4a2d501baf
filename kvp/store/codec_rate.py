"""How fast sequences go into and out of a store here, measured on small stores that are deleted."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kvp.geometry import Geometry
from kvp.store.importance_grid import edges_of
from kvp.store.reader import TraceReader
from kvp.store.schema import DTYPES, GRIDS, SequenceRecord, Trace
from kvp.store.store_plan import GridDtype, StorePlan, planned_bytes
from kvp.store.writer import TraceWriter

_BYTES = 2**24
"""Bytes of a measured sequence with its queries, about."""
_ROUNDS = 3
"""Sequences of which the fastest counts, after one that warms up."""


@dataclass(frozen=True, kw_only=True)
class CodecRates:
    """Raw bytes per second, as `kvp.costs.Rates` has them."""

    write_bytes: float
    read_bytes: float
    write_importance_bytes: float
    read_grid_bytes: float


def measured_codec_rates(
    geometry: Geometry,
    *,
    dtype: str,
    tokens: int,
    grid: int,
    grid_dtype: GridDtype,
    grid_labels: int,
    clock: Callable[[], float],
) -> CodecRates:
    """Write and read a store with queries, and one with an importance grid of these settings.

    They are in the folder for temporary files. Checks, checksums and what is forced to disk are
    part of all rates. Keys are random, grids the attention of random logits.
    """
    layer = replace(geometry, layers=1, layer_indices=())
    each = planned_bytes(layer, dtype=dtype, tokens=tokens)
    shape = replace(layer, layers=max(1, min(geometry.layers, _BYTES // each)))
    full = StorePlan(geometry=shape, dtype=dtype, max_tokens=tokens, sequences=_ROUNDS + 1)
    importance = replace(
        full,
        store="importance",
        grid=grid,
        grid_dtype=grid_dtype,
        grid_labels=tuple(GRIDS)[-grid_labels:],
    )
    bare = planned_bytes(shape, dtype=dtype, tokens=tokens, store="kv")
    whole = planned_bytes(
        shape,
        dtype=dtype,
        tokens=tokens,
        store="importance",
        grid=grid,
        grid_dtype=grid_dtype,
        grid_labels=grid_labels,
    )
    written, read = _seconds(full, lambda reader, index: reader.trace(index), clock)
    packed, looked_up = _seconds(importance, _read_label, clock)
    return CodecRates(
        write_bytes=planned_bytes(shape, dtype=dtype, tokens=tokens) / written,
        read_bytes=planned_bytes(shape, dtype=dtype, tokens=tokens) / read,
        write_importance_bytes=whole / packed,
        read_grid_bytes=(whole - bare) / looked_up,
    )


def _seconds(
    plan: StorePlan, read: Callable[[TraceReader, int], object], clock: Callable[[], float]
) -> tuple[float, float]:
    """Seconds in which a sequence of random numbers is written, and in which `read` reads it."""
    written, found = [], []
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "traces"
        manifest: dict[str, Any] = {"model": {}, "identity": {}}
        with TraceWriter.create_or_resume(path, plan, manifest, None) as writer:
            for index in range(plan.sequences):
                trace = _trace(index, plan)
                start = clock()
                writer.write(trace)
                written.append(clock() - start)
        reader = TraceReader(path)
        for index in range(plan.sequences):
            start = clock()
            read(reader, index)
            found.append(clock() - start)
    return max(min(written[1:]), 1e-9), max(min(found[1:]), 1e-9)


def _read_label(reader: TraceReader, index: int) -> Tensor:
    """A label at the middle point of its grid, as training reads it."""
    edges = reader.record(index).edges
    return reader.importance(tuple(GRIDS)[-1], index, edges[(len(edges) - 1) // 2])


def _trace(index: int, plan: StorePlan) -> Trace:
    """A sequence of random numbers."""
    size, tokens = plan.geometry, plan.max_tokens
    dtype = DTYPES[plan.dtype][0]
    shape = (size.layers, size.kv_heads, tokens, size.head_dim)
    keys, values = (torch.randn(shape).to(dtype) for _ in range(2))
    queries = None
    if plan.store_queries:
        queries = torch.randn(*shape[:2], size.group, *shape[2:]).to(dtype)
    prompt = max(1, tokens - 1)
    edges = edges_of(tokens, prompt, prompt, plan.grid) if plan.grid else ((), ())
    record = SequenceRecord(
        index=index,
        id=str(index),
        task="random",
        split="train",
        length=tokens,
        context_length=prompt,
        prompt_length=prompt,
        token_ids=(0,) * tokens,
        edges=edges[0],
        common_edges=edges[1],
    )
    grids = {label: _grid(plan, label, record) for label in plan.grid_points}
    return Trace(record=record, queries=queries, keys=keys, values=values, grids=grids)


def _grid(plan: StorePlan, label: str, record: SequenceRecord) -> Tensor:
    """[L, H, intervals, T] float32: the largest attention of a group's random logits.

    That of one head for all of them, which are compressed one by one.
    """
    shape = plan.shape(GRIDS[label], record)
    logits = torch.randn(plan.geometry.group, *shape[2:])
    for interval, start in enumerate(plan.edges_of(label, record)[:-1]):
        logits[:, interval, start:] = -torch.inf
    return logits.softmax(dim=-1).amax(dim=0).expand(shape)
