"""Evaluate rankings on held-out traces: attention lost per head, attention recall of the model.

No generation: queries, keys and values come from a trace store, importance from
`kvp.ops.future_attention`, scores from the same scorers that evict; those that need extra passes or
hidden states get them from the model, which runs over the stored tokens once more. Rankings are
measured head by head (curves.jsonl), budgets split over heads by what all heads keep together
(kept.jsonl). The numbers are those of `kvp.metrics`; `docs/formats.md` describes the files.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from eval.attention_recall import AttentionRecall, attention_recall, kept_row
from eval.config import EvalConfig
from eval.held_out_traces import boundary, held_out, protocols_apart, trace_views
from eval.methods import Method, method_fields, rankings
from eval.results.records import Row
from eval.settings import PROTECTIONS, Setting, plan, protection_of
from kvp import metrics
from kvp.budget_scores import Scored, score_budgets
from kvp.geometry import Geometry
from kvp.hf import ScorerInputs, observe
from kvp.hf.scorer_inputs import needs_scorer_inputs
from kvp.ops.future_attention import future_attention
from kvp.ranking import Protection
from kvp.scoring import Needs, View
from kvp.selection import Selection
from kvp.store import Trace, TraceReader

GRID_STEPS = 64
"""A curve has one point per 1/64 of the cache, both ends included."""

_METHOD_KEY = ("model", "method", "variant", "allocator", "protected", "policy", "protocol")
CURVE_KEY = (*_METHOD_KEY, "layer", "head")
KEPT_KEY = (*_METHOD_KEY, "budget_spec")


@dataclass(frozen=True, kw_only=True)
class Measured:
    """One ranking of one sequence. Leading axes: layer, KV head."""

    cost: Tensor
    """[L, H, grid] float64, share of attention lost at the budgets of the grid."""
    area: Tensor
    """[L, H] float64 (`kvp.metrics.area`)."""
    skill: Tensor
    """[L, H] float64 (`kvp.metrics.skill`); NaN for heads without signal."""


@dataclass(frozen=True, kw_only=True)
class TraceRows:
    """Everything measured on the held-out traces of a store."""

    curves: tuple[Row, ...]
    """Rows of curves.jsonl."""
    kept: tuple[Row, ...]
    """Rows of kept.jsonl."""


@dataclass(frozen=True, kw_only=True)
class _Sums:
    """Measurements, sequence by sequence."""

    curves: dict[tuple[Method, bool, str], list[Measured]] = field(default_factory=dict)
    kept: dict[tuple[Setting, str], list[AttentionRecall]] = field(default_factory=dict)


@torch.inference_mode()
def measure_traces(
    config: EvalConfig,
    methods: Sequence[Method],
    reader: TraceReader,
    model: PreTrainedModel | None = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
) -> TraceRows:
    """Rows from the held-out sequences of a store.

    `model` and `tokenizer` serve methods that need more than traces hold.
    """
    methods = [method for method in methods if method.scorer is not None]
    sums = _Sums()
    records = held_out(reader)[: config.curve_sequences]
    protocols = protocols_apart(config.protocol_list, records)
    cells = {
        protocol: _cells(config, methods, [boundary(record, protocol) for record in records])
        for protocol in protocols
    }
    for record in records:
        trace = reader.trace(record.index)
        for protocol in protocols:
            prefix_length = boundary(record, protocol)
            if 2 <= prefix_length < record.length:
                prompt = TracedPrompt(trace, prefix_length, config.device, model, tokenizer)
                for method in rankings(methods):
                    own = [c for c in cells[protocol] if c.method.ranking == method.ranking]
                    _measure(config, prompt, method, own, protocol, sums)
    return TraceRows(
        curves=tuple(
            row
            for (method, protected, protocol), parts in sums.curves.items()
            for row in _curve_rows(config, reader.geometry, method, protected, protocol, parts)
        ),
        kept=tuple(
            kept_row(config, cell, protocol, parts) for (cell, protocol), parts in sums.kept.items()
        ),
    )


class TracedPrompt:
    """One sequence compressed after its first `prefix_length` tokens."""

    def __init__(
        self,
        trace: Trace,
        prefix_length: int,
        device: str = "cpu",
        model: PreTrainedModel | None = None,
        tokenizer: PreTrainedTokenizerBase | None = None,
    ) -> None:
        """Compute the importance of its tokens."""
        self.prefix_length = prefix_length
        queries = None if trace.queries is None else trace.queries.to(device)
        self._parts = (queries, trace.keys.to(device), trace.values.to(device))
        if queries is None:
            on_device = trace.future_attention(prefix_length).to(device)
        else:
            on_device = future_attention(queries, self._parts[1], cut=prefix_length)
        self._future = on_device
        self.importance = on_device.cpu().double()
        """[L, H, N] float64, future attention of every token."""
        self._token_ids = torch.tensor([trace.record.token_ids[:prefix_length]], device=device)
        self._model = model
        self._tokenizer = tokenizer
        self._supplies: dict[int | None, ScorerInputs] = {}

    def scored(self, method: Method, budgets: Sequence[int]) -> list[Scored]:
        """Scores of a method for the budgets."""
        scorer = method.scorer
        assert scorer is not None, "the full cache has no scores"
        scorer_inputs = self._supply(scorer.needs) if needs_scorer_inputs(scorer.needs) else None
        queries, keys, values = self._parts

        def views_at(budget: int) -> Iterator[View]:
            return trace_views(
                queries,
                keys,
                values,
                self._future,
                self.prefix_length,
                scorer.needs,
                budget,
                scorer_inputs,
            )

        return score_budgets(scorer, views_at, budgets)

    def _supply(self, needs: Needs) -> ScorerInputs:
        """Extras of the stored tokens, from one more prefill; shared by the methods that agree."""
        assert self._model is not None, "methods that need extras are measured beside a model"
        after = needs.hidden_after
        if after not in self._supplies:
            seen = observe(
                self._model,
                self._token_ids,
                queries=0,
                last_logits=True,
                hidden_after=() if after is None else (after,),
            )
            self._supplies[after] = ScorerInputs(
                self._model,
                self._token_ids,
                seen.keys,
                seen.values,
                hidden=seen.hidden,
                tokenizer=self._tokenizer,
            )
        return self._supplies[after]

    def measure(self, scored: Sequence[Scored], protection: Protection) -> Measured:
        """Metrics of the rankings made for the grid's budgets (`kvp.metrics.grid_budgets`)."""
        grid = set(metrics.grid_budgets(self.prefix_length))
        serving = [
            (part.scores, max(grid.intersection(part.budgets)))
            for part in scored
            if grid.intersection(part.budgets)
        ]
        lost = metrics.lost_importance(self.importance, serving, protection)  # [L, H, N + 1]
        return Measured(
            cost=metrics.at_shares(lost, torch.linspace(0, 1, GRID_STEPS + 1)),
            area=metrics.area(lost),
            skill=metrics.skill(self.importance, lost, protection),
        )


def _cells(config: EvalConfig, methods: Sequence[Method], lengths: Sequence[int]) -> list[Setting]:
    """What kept.jsonl has a row for: all but budgets below the protected tokens."""
    cells, _ = plan(
        methods,
        config.budget_list,
        protection="off" if config.protection == "off" else "both",
        protected_tokens=protection_of(config, protected=True).tokens,
        shortest=min(lengths),
    )
    return [cell for cell in cells if cell.protected in PROTECTIONS[config.protection]]


def _measure(
    config: EvalConfig,
    prompt: TracedPrompt,
    method: Method,
    cells: Sequence[Setting],
    protocol: str,
    sums: _Sums,
) -> None:
    """Measure one scorer on one sequence: its rankings, and what all its allocators keep."""
    sizes = {cell: min(cell.tokens(prompt.prefix_length), prompt.prefix_length) for cell in cells}
    grid = metrics.grid_budgets(prompt.prefix_length)
    scored = prompt.scored(method, sorted({*grid, *sizes.values()}))
    for protected in PROTECTIONS[config.protection]:
        protection = protection_of(config, protected=protected)
        measured = prompt.measure(scored, protection)
        sums.curves.setdefault((method, protected, protocol), []).append(measured)
        for part in scored:
            matching = [
                cell for cell in cells
                if cell.protected is protected and sizes[cell] in part.budgets
            ]  # fmt: skip
            if not matching:
                continue
            selection = Selection(part.scores, protection, part.sizes)
            for cell in matching:
                counts = selection.counts(sizes[cell], cell.method.rule)
                share = attention_recall(prompt.importance, selection.ranking, counts)
                sums.kept.setdefault((cell, protocol), []).append(share)


def _curve_rows(
    config: EvalConfig,
    geometry: Geometry,
    method: Method,
    protected: bool,
    protocol: str,
    parts: Sequence[Measured],
) -> Iterator[Row]:
    """Means over sequences, head by head."""
    cost = torch.stack([part.cost for part in parts]).mean(0)
    area = torch.stack([part.area for part in parts]).mean(0)
    skill = torch.stack([part.skill for part in parts]).nanmean(0)  # NaN: no signal anywhere
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
                "skill": None if skill[layer, head].isnan() else float(skill[layer, head]),
                "area": float(area[layer, head]),
                "metrics_version": metrics.METRICS_VERSION,
                "sequences": len(parts),
            }
