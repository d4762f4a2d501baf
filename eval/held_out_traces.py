"""Held-out traces as prompts: stored sequences in the form that scorers read.

Queries, keys and values come from a trace store; what a method needs beyond them (extra passes,
hidden states, text) comes from running the model over the stored tokens again (`eval.cost_curves`).
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from kvp.errors import StoreError
from kvp.geometry import Geometry
from kvp.hf import Prefill
from kvp.store import SequenceRecord, Trace, TraceReader


def open_traces(path: str, geometry: Geometry) -> TraceReader:
    """The store of `--traces`; StoreError unless it gives curves for this geometry."""
    reader = TraceReader(path)
    if reader.geometry != geometry:
        raise StoreError(f"--traces {path} holds traces of {reader.geometry}, not of {geometry}")
    if not reader.plan.store_queries:
        raise StoreError(f"--traces {path} holds no queries; collect traces with them")
    held_out(reader)
    return reader


def held_out(reader: TraceReader) -> tuple[SequenceRecord, ...]:
    """Sequences no policy was trained on: the test split, or validation where there is none."""
    for split in ("test", "validation"):
        records = reader.records(split)
        if records:
            return records
    raise StoreError(f"--traces {reader.path} has no test and no validation sequences")


def boundary(record: SequenceRecord, protocol: str) -> int:
    """Cached tokens at compression, as in `eval.tasks.Prompt.boundary`."""
    if protocol == "query_aware":
        return record.prompt_length - 1
    return min(record.context_length, record.prompt_length - 1)


def protocols_apart(protocols: Sequence[str], records: Sequence[SequenceRecord]) -> tuple[str, ...]:
    """Protocols to measure: of two with the same compression point, query_agnostic."""
    if all(boundary(record, "query_aware") == boundary(record, "query_agnostic")
           for record in records):  # fmt: skip
        return ("query_agnostic",)
    return tuple(protocols)


def stored_prefill(
    trace: Trace, prefix_length: int, device: str = "cpu", layers: Sequence[int] | None = None
) -> Prefill:
    """The prefill of a trace up to a boundary, as if the model had just run over it.

    `layers` are the model's indices of the traced ones (`Geometry.model_layers`); None: from 0.
    """
    again = trace.record.fed_again(prefix_length)
    tokens = prefix_length + again
    keys, values = trace.keys.to(device), trace.values.to(device)  # [L, H, T, D]
    queries: tuple[Tensor, ...] = ()
    if trace.queries is not None:
        stored = trace.queries.to(device)[..., :tokens, :]  # [L, H, G, T, D]
        queries = tuple(layer.flatten(0, 1)[None] for layer in stored)  # [1, Q, T, D]
    return Prefill(
        keys=tuple(layer[None, :, :tokens] for layer in keys),
        values=tuple(layer[None, :, :tokens] for layer in values),
        queries=queries,
        fed_again=again,
        question=max(0, prefix_length - trace.record.context_length),
        layers=layers,
    )
