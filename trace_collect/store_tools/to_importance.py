"""`kvp store to-importance`: an importance grid in place of queries, for a fraction of the bytes.

The new store has the identity of the old one and holds what kvp-collect --store importance would
have written, so either of the two continues what the other one began.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from typing import Any

import torch

from kvp.artifacts.addresses import place
from kvp.errors import StoreError
from kvp.hf.loading import torch_device
from kvp.store import SequenceRecord, StorePlan, Trace
from kvp.store.importance_grid import edges_of, label_grids
from kvp.store.schema import DTYPES, GRID_ARRAYS
from trace_collect.store_tools.config import ToImportanceConfig
from trace_collect.store_tools.copying import NewStore, write_store
from trace_collect.store_tools.source_stores import SourceStore, derived_manifest, open_source


def run(config: ToImportanceConfig) -> None:
    """Write the store; raises StoreError as `open_source` and `write_store`."""
    device = torch_device(config.device)
    source = open_source(config.traces, config.out, allow_incomplete=config.allow_incomplete)
    old = source.reader.plan
    if not old.store_queries:
        raise StoreError(
            f"{config.traces} keeps no queries (it is --store {old.store}), which importance is "
            "computed from: collect with kvp-collect --store qkv or importance"
        )
    plan = replace(
        old, store="importance", grid=config.grid, grid_dtype=config.grid_dtype,
        grid_labels=config.grid_label_list,
    )  # fmt: skip
    write_store(
        NewStore(
            out=place(config.out),
            plan=plan,
            manifest=_manifest(config, source),
            sequences={record.index: (source.reader, record) for record in source.records},
            change=partial(
                with_importance,
                points=config.grid,
                labels=config.grid_label_list,
                device=device,
            ),
            extra_bytes=partial(_grid_bytes, plan),
        )
    )


def with_importance(
    trace: Trace, *, points: int, labels: Sequence[str], device: torch.device
) -> Trace:
    """A trace with queries as `kvp.hf.trace.collect` makes it with a grid of `points` points.

    `labels` are those kept at all points. Layer by layer on `device`; the grids are
    [L, H, intervals, T] float32 on the CPU.
    """
    assert trace.queries is not None, "checked before"
    edges, common_edges = edges_of(
        trace.record.length, trace.record.context_length, trace.record.prompt_length, points
    )
    record = replace(trace.record, edges=edges, common_edges=common_edges)
    layers = []
    for queries, keys in zip(trace.queries, trace.keys, strict=True):
        grids = label_grids(queries.to(device), keys.to(device), record, labels)
        layers.append({label: grid.cpu() for label, grid in grids.items()})
    return replace(
        trace,
        record=record,
        queries=None,
        grids={label: torch.stack([layer[label] for layer in layers]) for label in layers[0]},
    )


def _manifest(config: ToImportanceConfig, source: SourceStore) -> Mapping[str, Any]:
    return derived_manifest(asdict(config), source.identity, [source])


def _grid_bytes(plan: StorePlan, record: SequenceRecord) -> int:
    """Bytes of the grids of a sequence before compression."""
    itemsize = DTYPES[plan.grid_dtype][0].itemsize
    numbers = sum(math.prod(plan.shape(array)[:-1]) * record.length for array in GRID_ARRAYS)
    return numbers * itemsize
