"""`kvp store inspect`: what a store holds, by its manifest, records and the sizes of files."""

from __future__ import annotations

import json
import math
import shlex
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from itertools import pairwise
from statistics import median
from typing import Any

from rich.filesize import decimal

from kvp.artifacts.addresses import Place, files_below, place, size_of
from kvp.errors import StoreError
from kvp.store import SequenceRecord, TraceReader
from kvp.store.paths import array_settings, shard_path
from kvp.store.schema import DTYPES
from kvp.store.sequence_records import committed
from trace_collect.store_tools.config import SPLITS, InspectConfig

_KEPT = {
    "qkv": "queries, keys and values",
    "kv": "keys and values",
    "importance": "keys and values, and an importance grid in place of queries",
}


def run(config: InspectConfig) -> None:
    """Print the facts; raises StoreError where the folder holds no store that can be read."""
    found = facts(place(config.traces))
    print(json.dumps(found, indent=1) if config.json else "\n".join(lines(found)))


def facts(path: Place) -> dict[str, Any]:
    """Everything that is known of a store, as JSON; damaged sequences are counted, not read.

    Sizes are bytes, lengths tokens; `raw` is without padding and compression.
    """
    reader = TraceReader(path)
    manifest, plan = reader.manifest, reader.plan
    records, damaged = _readable(reader)
    present = {*(record.index for record in records), *damaged}
    identity = manifest["identity"]
    known = ("rope_frequencies", "seed", "kvp", "python", "packages", "command", "created")
    return {
        "path": str(path),
        "format_version": manifest["format_version"],
        "complete": len(records) == plan.sequences,
        "planned": plan.sequences,
        "sequences": len(records),
        "missing": [index for index in range(plan.sequences) if index not in present],
        "damaged": damaged,
        "model": {**manifest.get("model", {}), **_mapping(identity.get("model"))},
        "geometry": plan.geometry.to_dict(),
        "dtype": plan.dtype,
        "store": plan.store,
        "grid": plan.grid,
        "grid_dtype": plan.grid_dtype if plan.grid else None,
        "grid_points": plan.grid_points,
        "labels": list(plan.labels),
        "max_tokens": plan.max_tokens,
        "splits": {split: _lengths(records, split) for split in SPLITS},
        "tasks": dict(Counter(record.task for record in records)),
        "tokens": sum(record.length for record in records),
        "arrays": [_array(reader, array, records) for array in plan.arrays],
        "disk_bytes": sum(size for _, size in files_below(path)),
        "output_gram": reader.output_gram() is not None,
        "data": identity.get("data"),
        "answers": identity.get("continuation"),
        **{name: manifest.get(name) for name in known},
        "sources": manifest.get("sources", []),
    }


def lines(found: Mapping[str, Any]) -> list[str]:
    """The facts for people, on one screen."""
    state = "complete" if found["complete"] else "not complete"
    rows = [
        ("sequences", f"{found['sequences']} of {found['planned']} planned ({state})"),
        *_incomplete(found),
        ("model", _model(found)),
        ("heads", _geometry(found["geometry"])),
        ("keeps", _kept(found)),
        *((f"  {split}", _split(one)) for split, one in found["splits"].items() if one),
        ("tasks", _counts(found["tasks"])),
        ("data", _data(found)),
        ("size", _size(found)),
        *((f"  {one['name']}", _array_row(one)) for one in found["arrays"]),
        ("also", _also(found)),
        ("made", f"{found['created'] or 'at an unknown time'} by kvp {found['kvp'] or 'unknown'}"),
        ("by", shlex.join(found["command"] or ["unknown"])),
        *(("from", f"{one['path']}: {one['sequences']}") for one in found["sources"]),
    ]
    width = max(len(name) for name, _ in rows)
    title = f"{found['path']}: trace store, format version {found['format_version']}"
    return [title, *(f"  {name:<{width}}  {value}" for name, value in rows)]


def ranges(indices: Sequence[int]) -> str:
    """Ascending numbers in short, `0-4,7`."""
    if not indices:
        return ""
    breaks = [at for at, (low, high) in enumerate(pairwise(indices), 1) if high != low + 1]
    bounds = pairwise([0, *breaks, len(indices)])
    parts = [(indices[start], indices[stop - 1]) for start, stop in bounds]
    return ",".join(str(low) if low == high else f"{low}-{high}" for low, high in parts)


def _readable(reader: TraceReader) -> tuple[list[SequenceRecord], list[int]]:
    with suppress(StoreError):
        return list(reader.records()), []
    records, damaged = [], []
    for index in committed(reader.path):
        try:
            records.append(reader.record(index))
        except StoreError:
            damaged.append(index)
    return records, damaged


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
    """Name, axes, shape, dtype and bytes of an array."""
    plan, settings = reader.plan, array_settings(reader.plan, array)
    dtype = plan.dtype_of(array)
    numbers = sum(math.prod(plan.shape(array, record)) for record in records)
    shards = (shard_path(reader.path, array, record.index) for record in records)
    return {
        "name": array,
        "axes": settings["dimension_names"],
        "shape": list(settings["shape"]),
        "dtype": dtype,
        "raw_bytes": numbers * DTYPES[dtype][0].itemsize,
        "disk_bytes": sum(size_of(shard) or 0 for shard in shards),
    }


def _mapping(value: object) -> dict[str, Any]:
    return dict(value) if isinstance(value, Mapping) else {}


def _incomplete(found: Mapping[str, Any]) -> list[tuple[str, str]]:
    rows = []
    if found["missing"]:
        rows.append(("  missing", ranges(found["missing"])))
    if found["damaged"]:
        path = shlex.quote(found["path"])
        rows.append(("  damaged", f"{ranges(found['damaged'])}; see kvp store verify {path}"))
    return rows


def _model(found: Mapping[str, Any]) -> str:
    model = found["model"]
    parts = [str(model.get("id", "unknown"))]
    parts += [f"revision {model['revision']}"] if model.get("revision") else []
    parts += [f"weights {model['weights'][:12]}"] if model.get("weights") else []
    return ", ".join(parts)


def _geometry(size: Mapping[str, Any]) -> str:
    layers = f"{size['layers']} layers"
    if size.get("layer_indices"):
        layers += f" ({ranges(size['layer_indices'])} of the model)"
    return (
        f"{layers} of {size['kv_heads']} KV heads with {size['query_heads']} query heads, "
        f"{size['head_dim']} channels"
    )


def _kept(found: Mapping[str, Any]) -> str:
    text = f"{_KEPT[found['store']]}, {found['dtype']}"
    if found["grid"]:
        labels = (f"{label} at {points}" for label, points in found["grid_points"].items())
        text += f"; grid of {found['grid_dtype']}: {', '.join(labels)} points"
    return text + (f"; labels {', '.join(found['labels'])}" if found["labels"] else "")


def _split(one: Mapping[str, int]) -> str:
    return (
        f"{one['sequences']} sequences, {one['tokens']} tokens (shortest {one['shortest']}, "
        f"median {one['median']}, longest {one['longest']})"
    )


def _counts(tasks: Mapping[str, int]) -> str:
    return ", ".join(f"{task} {count}" for task, count in tasks.items()) or "none"


def _data(found: Mapping[str, Any]) -> str:
    data = _mapping(found["data"])
    return (
        f"{data.get('name', 'unknown')}, prompts of at most {data.get('length', '?')} tokens, "
        f"answers {found['answers'] or 'unknown'}, seed {found['seed']}"
    )


def _size(found: Mapping[str, Any]) -> str:
    raw = sum(one["raw_bytes"] for one in found["arrays"])
    return (
        f"{found['tokens']} tokens, {decimal(raw)} raw, {decimal(found['disk_bytes'])} on disk; "
        f"sequences of at most {found['max_tokens']} tokens"
    )


def _array_row(one: Mapping[str, Any]) -> str:
    shape = " x ".join(map(str, one["shape"]))
    return (
        f"{shape}, {one['dtype']}, {decimal(one['raw_bytes'])} raw, {decimal(one['disk_bytes'])} "
        "on disk"
    )


def _also(found: Mapping[str, Any]) -> str:
    rope = "frequencies of the rotary embedding" if found["rope_frequencies"] else ""
    gram = "Gram matrices of the output projection" if found["output_gram"] else ""
    return ", ".join(part for part in (rope, gram) if part) or "nothing else of the model"
