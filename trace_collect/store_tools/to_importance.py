"""`kvp store to-importance`: an importance grid in place of queries, for a fraction of the bytes.

The new store has the identity of the old one and holds what kvp-collect --store importance would
have written, so either of the two continues what the other one began.
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

import torch
from rich.filesize import decimal

from kvp.artifacts.addresses import Place, files_below, place, size_of
from kvp.artifacts.disk_space import check_disk
from kvp.errors import StoreError
from kvp.hf.loading import torch_device
from kvp.manifest import run_manifest
from kvp.progress import Progress
from kvp.store import SequenceRecord, StorePlan, Trace, TraceReader, TraceWriter
from kvp.store.importance_grid import edges_of, label_grids
from kvp.store.paths import shard_path
from kvp.store.schema import DTYPES, GRID_ARRAYS
from kvp.store.sequence_records import committed
from trace_collect.store_tools.config import ToImportanceConfig
from trace_collect.store_tools.inspection import ranges


def run(config: ToImportanceConfig) -> None:
    """Write every sequence that is not there yet; prints what is there at the end.

    Raises StoreError where the store that is read is damaged, holds nothing or no queries, is
    incomplete without `allow_incomplete` or is the folder that is to be written, where that holds
    something else, and where the disk is too small.
    """
    device, out = torch_device(config.device), place(config.out)
    reader = _opened(config)
    records = reader.records()
    plan = replace(
        reader.plan, store="importance", grid=config.grid, grid_dtype=config.grid_dtype,
        grid_labels=config.grid_label_list,
    )  # fmt: skip
    there = set(committed(out))
    wanted = [record for record in records if record.index not in there]
    check_disk(out, sum(_bytes(reader, plan, record) for record in wanted))
    manifest, gram = _manifest(config, reader), reader.output_gram()
    with TraceWriter.create_or_resume(out, plan, manifest, gram) as writer:
        absent = set(writer.missing())
        missing = [record.index for record in records if record.index in absent]
        if done := len(records) - len(missing):
            print(f"{out}: {done} of {len(records)} sequences are there")
        with Progress("converting", len(records), completed=done) as progress:
            for index in missing:
                writer.write(
                    with_importance(
                        reader.trace(index),
                        points=config.grid,
                        labels=config.grid_label_list,
                        device=device,
                    )
                )
                progress.advance()
    _print_end(out, len(records))


def _opened(config: ToImportanceConfig) -> TraceReader:
    """The store that is read; errors as `run`."""
    if place(config.traces).resolve() == place(config.out).resolve():
        raise StoreError(f"--out {config.out} is the store that is read; name a new folder")
    reader = TraceReader(config.traces)
    there, planned = len(reader.records()), reader.plan.sequences
    if not there:
        raise StoreError(f"{config.traces} holds no sequence")
    if there < planned and not config.allow_incomplete:
        raise StoreError(
            f"{config.traces} lacks {planned - there} of {planned} sequences; let kvp-collect "
            "finish, or pass --allow_incomplete"
        )
    if not reader.plan.store_queries:
        raise StoreError(
            f"{config.traces} keeps no queries (it is --store {reader.plan.store}), which "
            "importance is computed from: collect with kvp-collect --store qkv or importance"
        )
    return reader


def _print_end(out: Place, sequences: int) -> None:
    size = sum(size for _, size in files_below(out))
    print(f"{out}: {sequences} sequences, {decimal(size)}")
    print(f"next: kvp store verify {shlex.quote(str(out))}")


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


def _manifest(config: ToImportanceConfig, reader: TraceReader) -> dict[str, Any]:
    """The manifest, with the identity of the store that is read and what made that."""
    old = reader.manifest
    kept = ("identity", "command", "created", "kvp", "sources")
    source = {
        "path": str(reader.path),
        "sequences": ranges([record.index for record in reader.records()]),
        **{name: old[name] for name in kept if name in old},
    }
    shared = {name: old[name] for name in ("model", "rope_frequencies") if name in old}
    identity = dict(old["identity"])
    made = run_manifest(
        asdict(config), seed=old.get("seed", 0), identity=identity, sources=[source], **shared
    )
    return made | {"seed": identity.get("seed", made["seed"])}


def _bytes(reader: TraceReader, plan: StorePlan, record: SequenceRecord) -> int:
    """Bytes of a sequence on disk: of the arrays that are copied, and of grids uncompressed."""
    copied = set(reader.plan.arrays) & set(plan.arrays)
    shards = (shard_path(reader.path, array, record.index) for array in copied)
    itemsize = DTYPES[plan.grid_dtype][0].itemsize
    numbers = sum(math.prod(plan.shape(array)[:-1]) * record.length for array in GRID_ARRAYS)
    return sum(size_of(shard) or 0 for shard in shards) + numbers * itemsize
