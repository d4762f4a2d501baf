"""Cost of every budget on held-out traces: how much future attention each method's ranking loses.

No generation: queries, keys and values come from a trace store, importance from
`kvp.ops.future_attention`, scores from the same scorers that evict. Per head and protocol, averaged
over sequences; curves.jsonl is the whole output (`docs/formats.md`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from eval.config import EvalConfig
from eval.methods import Method, method_fields, protection_of
from eval.rows import Row
from eval.selection import rank_layers, score_layers
from kvp.errors import StoreError
from kvp.geometry import Geometry
from kvp.ops.future_attention import future_attention
from kvp.reward import cost_curve, ideal_cost, random_cost
from kvp.scoring import ALL_QUERIES, Needs, View
from kvp.store import SequenceRecord, Trace, TraceReader

GRID_STEPS = 64
"""A curve has one point per 1/64 of the cache, both ends included."""

CURVE_KEY = (
    "model",
    "method",
    "variant",
    "protected",
    "policy",
    "protocol",
    "layer",
    "head",
)


@dataclass(frozen=True, kw_only=True)
class Measured:
    """One ranking of one sequence. Leading axes: layer, KV head."""

    cost: Tensor
    """[L, H, grid] float64, E_b / W."""
    area: Tensor
    """[L, H] float64, mean over budgets 1..N-1 of E_b / W."""
    skill: Tensor
    """[L, H] float64, 1 = ideal, 0 = random; NaN where all tokens matter alike."""


def open_traces(path: str, geometry: Geometry) -> TraceReader:
    """The store of `--curves`; StoreError unless it can give curves for this geometry."""
    reader = TraceReader(Path(path))
    if reader.geometry != geometry:
        raise StoreError(f"--curves {path} holds traces of {reader.geometry}, not of {geometry}")
    if not reader.plan.store_queries:
        raise StoreError(f"--curves {path} holds no queries; collect traces with them")
    held_out(reader)
    return reader


def curve_rows(config: EvalConfig, methods: Sequence[Method], reader: TraceReader) -> Iterator[Row]:
    """Rows of curves.jsonl from the held-out sequences of a store."""
    geometry = reader.geometry
    records = held_out(reader)[: config.curve_sequences]
    flags = {"both": (True, False), "on": (True,), "off": (False,)}[config.protection]
    sums: dict[tuple[Method, bool, str], list[Measured]] = {}
    for record in records:
        trace = reader.trace(record.index)
        for protocol in config.protocol_list:
            cut = boundary(record, protocol)
            if not 2 <= cut < record.length:
                continue
            for method, protected, measured in trace_curves(config, trace, cut, methods, flags):
                sums.setdefault((method, protected, protocol), []).append(measured)
    for (method, protected, protocol), parts in sums.items():
        cost = torch.stack([part.cost for part in parts]).mean(0)
        area = torch.stack([part.area for part in parts]).mean(0)
        skill = torch.stack([part.skill for part in parts]).nanmean(0).nan_to_num(0.0)
        for layer in range(geometry.layers):
            for head in range(geometry.kv_heads):
                yield {
                    "model": config.model,
                    **method_fields(method),
                    "protected": protected,
                    "protocol": protocol,
                    "layer": layer,
                    "head": head,
                    "budgets": [step / GRID_STEPS for step in range(GRID_STEPS + 1)],
                    "cost": cost[layer, head].tolist(),
                    "skill": float(skill[layer, head]),
                    "area": float(area[layer, head]),
                    "sequences": len(parts),
                }


def held_out(reader: TraceReader) -> tuple[SequenceRecord, ...]:
    """Sequences no policy was trained on: the test split, or validation where there is none."""
    for split in ("test", "validation"):
        records = reader.records(split)
        if records:
            return records
    raise StoreError(f"--curves {reader.path} has no test and no validation sequences")


def boundary(record: SequenceRecord, protocol: str) -> int:
    """Cached tokens at compression, as in `eval.tasks.Prompt.boundary`."""
    if protocol == "query_aware":
        return record.prompt_length - 1
    return min(record.context_length, record.prompt_length - 1)


@torch.inference_mode()
def trace_curves(
    config: EvalConfig, trace: Trace, cut: int, methods: Iterable[Method], flags: Sequence[bool]
) -> Iterator[tuple[Method, bool, Measured]]:
    """Every method, with and without protection, on one sequence compressed at `cut` tokens."""
    assert trace.queries is not None, "open_traces refuses stores without queries"
    queries, keys, values = (
        part.to(config.device) for part in (trace.queries, trace.keys, trace.values)
    )
    importance = future_attention(queries, keys, cut=cut)
    budgets = sorted({max(1, round(step * cut / GRID_STEPS)) for step in range(1, GRID_STEPS + 1)})
    for method in methods:
        if method.scorer is None:
            continue
        needs = method.scorer.needs

        def views_at(budget: int, needs: Needs = needs) -> Iterator[View]:
            return trace_views(queries, keys, values, importance, cut, needs, budget)

        scored = score_layers(method.scorer, views_at, budgets)
        for protected in flags:
            protection = protection_of(config, protected=protected)
            lost = torch.zeros(*importance.shape[:-1], cut + 1, dtype=torch.float64)
            done = -1
            for scores, served in scored:
                ranking = rank_layers(scores, protection)
                curve = cost_curve(importance.cpu().double(), ranking)
                last = cut if served[-1] == budgets[-1] else served[-1]
                lost[..., done + 1 : last + 1] = curve[..., done + 1 : last + 1]
                done = last
            yield method, protected, measure(lost, importance.cpu().double())


def trace_views(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    importance: Tensor,
    cut: int,
    needs: Needs,
    budget: int,
) -> Iterator[View]:
    """Views of a trace's first `cut` tokens, layer by layer, with what a method needs.

    queries [L, H, G, T, D], keys and values [L, H, T, D], importance [L, H, cut].
    """
    window = cut if needs.queries == ALL_QUERIES else min(needs.queries, cut)
    positions = torch.arange(cut, device=keys.device)[None]
    for layer in range(keys.shape[0]):
        recent = queries[layer, :, :, cut - window : cut].flatten(0, 1)[None]
        yield View(
            layer=layer,
            keys=keys[None, layer, :, :cut],
            values=values[None, layer, :, :cut],
            positions=positions,
            budget=budget,
            queries=recent if window else None,
            future=importance[None, layer] if needs.future else None,
        )


def measure(lost: Tensor, importance: Tensor) -> Measured:
    """Curve, area and skill from the importance lost at every budget.

    Args:
        lost: [L, H, N + 1] float64, E_b for b = 0..N.
        importance: [L, H, N] float64.
    """
    tokens = importance.shape[-1]
    total = importance.sum(-1, keepdim=True).clamp_min(torch.finfo(torch.float64).tiny)
    relative = lost / total
    place = torch.linspace(0, tokens, GRID_STEPS + 1, dtype=torch.float64)
    lower = place.floor().long().clamp(max=tokens - 1)
    share = place - lower
    cost = relative[..., lower] * (1 - share) + relative[..., lower + 1] * share
    chance, ideal = random_cost(importance), ideal_cost(importance)
    span = chance - ideal
    skill = (chance - lost[..., 1:tokens].sum(-1)) / span
    return Measured(
        cost=cost,
        area=relative[..., 1:tokens].mean(-1),
        skill=torch.where(span > 1e-6 * chance, skill, torch.nan),
    )
