"""`kvp store inspect` and `kvp store verify`: what a store holds, and whether it is whole."""

from __future__ import annotations

import json
import math
import shlex
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from statistics import median
from typing import Any

import yaml

from kvp.artifacts.addresses import Place, files_below, place, size_of
from kvp.errors import StoreError
from kvp.progress import Progress
from kvp.store import SequenceRecord, TraceReader
from kvp.store.metadata import SEQUENCES, committed
from kvp.store.schema import DTYPES
from kvp.store.shards import shard_path
from trace_collect.config import SPLITS, InspectConfig, VerifyConfig


def inspect(config: InspectConfig) -> None:
    """Print the facts; raises StoreError where the folder holds no store that can be read."""
    found = facts(place(config.traces))
    if config.json:
        print(json.dumps(found, indent=1))
    else:
        print(yaml.safe_dump(found, sort_keys=False, default_flow_style=None, width=100), end="")


def facts(path: Place) -> dict[str, Any]:
    """What a store holds, as JSON; StoreError where a record is damaged.

    Sizes are bytes, lengths tokens; `raw` is without padding and compression.
    """
    reader = TraceReader(path)
    manifest, plan, records = reader.manifest, reader.plan, reader.records()
    identity = manifest["identity"]
    present = {record.index for record in records}
    return {
        "complete": len(records) == plan.sequences,
        "sequences": len(records),
        "planned": plan.sequences,
        "missing": ranges([index for index in range(plan.sequences) if index not in present]),
        "model": {**manifest.get("model", {}), **identity.get("model", {})},
        "plan": plan.to_dict(),
        "splits": {split: _lengths(records, split) for split in SPLITS},
        "tasks": dict(Counter(record.task for record in records)),
        "tokens": sum(record.length for record in records),
        "arrays": {array: _array(reader, array, records) for array in plan.arrays},
        "disk_bytes": sum(size for _, size in files_below(path)),
        "data": identity.get("data"),
        "answers": identity.get("continuation"),
        "command": shlex.join(manifest.get("command", [])),
    }


def ranges(indices: Sequence[int]) -> str:
    """Ascending numbers in short, `0-4,7`."""
    if not indices:
        return ""
    breaks = [at for at, (low, high) in enumerate(pairwise(indices), 1) if high != low + 1]
    bounds = pairwise([0, *breaks, len(indices)])
    parts = [(indices[start], indices[stop - 1]) for start, stop in bounds]
    return ",".join(str(low) if low == high else f"{low}-{high}" for low, high in parts)


def _lengths(records: Sequence[SequenceRecord], split: str) -> dict[str, int] | None:
    """Sequences of a split and their lengths; None where there are none."""
    lengths = [record.length for record in records if record.split == split]
    if not lengths:
        return None
    return {
        "sequences": len(lengths),
        "tokens": sum(lengths),
        "shortest": min(lengths),
        "median": round(median(lengths)),
        "longest": max(lengths),
    }


def _array(reader: TraceReader, array: str, records: Sequence[SequenceRecord]) -> dict[str, Any]:
    """Shape, dtype and bytes of an array."""
    plan = reader.plan
    dtype = plan.dtype_of(array)
    numbers = sum(math.prod(plan.shape(array, record)) for record in records)
    shards = (shard_path(reader.path, array, record.index) for record in records)
    return {
        "shape": [plan.sequences, *plan.shape(array)],
        "dtype": dtype,
        "raw_bytes": numbers * DTYPES[dtype][0].itemsize,
        "disk_bytes": sum(size_of(shard) or 0 for shard in shards),
    }


def verify(config: VerifyConfig) -> None:
    """Print a line per damaged sequence.

    Raises StoreError at the end where a sequence is damaged, or missing without
    `allow_incomplete`; at once where the store's own metadata are damaged.
    """
    path = place(config.traces)
    reader = TraceReader(path)
    present = committed(path)
    damaged: list[int] = []
    with Progress("verifying", len(present)) as progress:
        for index in present:
            try:
                reader.trace(index)
            except (StoreError, OSError) as problem:
                damaged.append(index)
                print(f"sequence {index}: {' '.join(str(problem).split())}")
            progress.advance()
    planned = reader.plan.sequences
    missing = sorted({*range(planned)} - {*present})
    if missing:
        print(f"missing: {ranges(missing)}")
    if not damaged and (config.allow_incomplete or not missing):
        print(f"{path}: {len(present)} of {planned} sequences, every byte as it was written")
        return
    parts = [f"{len(damaged)} damaged ({ranges(damaged)})"] if damaged else []
    parts += [f"{len(missing)} missing ({ranges(missing)})"] if missing else []
    delete = f"delete NNNNNN.json of the damaged ones in {path / SEQUENCES}, then "
    raise StoreError(
        f"{path}: of {planned} sequences {' and '.join(parts)}; to mend it "
        f"{delete if damaged else ''}repeat the command that made it (kvp store inspect shows it)"
    )
