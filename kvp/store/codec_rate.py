"""How fast sequences go into and out of a store here, measured on a small store that is deleted."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from kvp.geometry import Geometry
from kvp.store.reader import TraceReader
from kvp.store.schema import DTYPES, SequenceRecord, Trace
from kvp.store.store_plan import StorePlan, planned_bytes
from kvp.store.writer import TraceWriter

_BYTES = 2**24
"""Bytes of a measured sequence, about."""
_ROUNDS = 3
"""Sequences of which the fastest counts, after one that warms up."""


def measured_codec_rates(
    geometry: Geometry, *, dtype: str, tokens: int, clock: Callable[[], float]
) -> tuple[float, float]:
    """Raw bytes per second written to and read from a store with queries of this shape and dtype.

    The store is in the folder for temporary files. Checks, checksums and what is forced to disk are
    part of both.
    """
    layer = replace(geometry, layers=1, layer_indices=())
    each = planned_bytes(layer, dtype=dtype, tokens=tokens)
    shape = replace(layer, layers=max(1, min(geometry.layers, _BYTES // each)))
    plan = StorePlan(geometry=shape, dtype=dtype, max_tokens=tokens, sequences=_ROUNDS + 1)
    written, read = [], []
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "traces"
        manifest: dict[str, Any] = {"model": {}, "identity": {}}
        with TraceWriter.create_or_resume(path, plan, manifest, None) as writer:
            for index in range(_ROUNDS + 1):
                trace = _trace(index, plan)
                start = clock()
                writer.write(trace)
                written.append(clock() - start)
        reader = TraceReader(path)
        for index in range(_ROUNDS + 1):
            start = clock()
            reader.trace(index)
            read.append(clock() - start)
    size = planned_bytes(shape, dtype=dtype, tokens=tokens)
    return size / max(min(written[1:]), 1e-9), size / max(min(read[1:]), 1e-9)


def _trace(index: int, plan: StorePlan) -> Trace:
    """A sequence of random numbers."""
    size, tokens = plan.geometry, plan.max_tokens
    dtype = DTYPES[plan.dtype][0]
    shape = (size.layers, size.kv_heads, tokens, size.head_dim)
    keys, values = (torch.randn(shape).to(dtype) for _ in range(2))
    queries = torch.randn(*shape[:2], size.group, *shape[2:]).to(dtype)
    record = SequenceRecord(
        index=index,
        id=str(index),
        task="random",
        split="train",
        length=tokens,
        context_length=max(1, tokens - 1),
        prompt_length=max(1, tokens - 1),
        token_ids=(0,) * tokens,
    )
    return Trace(record=record, queries=queries, keys=keys, values=values)
