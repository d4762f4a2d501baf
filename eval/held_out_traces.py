"""Held-out traces as prompts: what scorers can see of a stored sequence, and what it was worth.

Queries, keys and values come from a trace store; what a method needs beyond them (extra passes,
hidden states, text) comes from running the model over the stored tokens again (`eval.cost_curves`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor

from eval.methods import Method
from kvp.errors import StoreError
from kvp.geometry import Geometry
from kvp.hf import ScorerInputs
from kvp.hf.scorer_inputs import needs_scorer_inputs
from kvp.scoring import ALL_QUERIES, Needs, View
from kvp.store import SequenceRecord, TraceReader


def open_traces(path: str, geometry: Geometry, methods: Iterable[Method] = ()) -> TraceReader:
    """The store of `--traces`; StoreError unless it gives curves for this geometry and `methods`.

    An importance grid tells what tokens were worth; methods that look at queries need those, too.
    """
    reader = TraceReader(Path(path))
    if reader.geometry != geometry:
        raise StoreError(f"--traces {path} holds traces of {reader.geometry}, not of {geometry}")
    if reader.plan.store == "kv":
        raise StoreError(f"--traces {path} holds no queries; collect traces with them")
    reading = [each.name for each in methods if each.scorer and each.scorer.needs.queries]
    if reading and not reader.plan.store_queries:
        raise StoreError(
            f"--traces {path} holds no queries, which {', '.join(dict.fromkeys(reading))} read; "
            "collect with kvp-collect --store qkv, or leave them out of --methods"
        )
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
    """Protocols worth measuring: of two that compress alike (running text), query_agnostic."""
    if all(boundary(record, "query_aware") == boundary(record, "query_agnostic")
           for record in records):  # fmt: skip
        return ("query_agnostic",)
    return tuple(protocols)


def trace_views(
    queries: Tensor | None,
    keys: Tensor,
    values: Tensor,
    importance: Tensor,
    cut: int,
    needs: Needs,
    budget: int,
    scorer_inputs: ScorerInputs | None = None,
) -> Iterator[View]:
    """Views of a trace's first `cut` tokens, layer by layer, with what a method needs.

    queries [L, H, G, T, D] (None where no method asks for them), keys and values [L, H, T, D],
    importance [L, H, cut].
    """
    window = cut if needs.queries == ALL_QUERIES else min(needs.queries, cut)
    positions = torch.arange(cut, device=keys.device)[None]
    extras = (
        scorer_inputs.for_needs(needs)
        if scorer_inputs is not None and needs_scorer_inputs(needs)
        else ()
    )
    for layer in range(keys.shape[0]):
        recent = None
        if window:
            assert queries is not None, "open_traces refuses stores without queries"
            recent = queries[layer, :, :, cut - window : cut].flatten(0, 1)[None]
        yield View(
            layer=layer,
            keys=keys[None, layer, :, :cut],
            values=values[None, layer, :, :cut],
            positions=positions,
            budget=budget,
            queries=recent,
            future=importance[None, layer] if needs.future else None,
            **(vars(extras[layer]) if extras else {}),
        )
