"""What budgets cost on held-out traces: attention lost by each head, kept by the whole model.

No generation: queries, keys and values come from a trace store, importance from
`kvp.ops.future_attention`, scores from the same scorers that evict; those that need extra passes or
hidden states get them from the model, which runs over the stored tokens once more. Rankings are
judged head by head (curves.jsonl), budgets split over heads by what all heads keep together
(kept.jsonl); `docs/formats.md` describes both.
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
from eval.selection import Ranked
from eval.settings import PROTECTIONS, Setting, plan, protection_of
from kvp.budget_scores import Scored, score_budgets
from kvp.geometry import Geometry
from kvp.hf import ScorerInputs, observe
from kvp.hf.scorer_inputs import needs_scorer_inputs
from kvp.ops.future_attention import future_attention
from kvp.ranking import Protection
from kvp.reward import cost_curve, ideal_cost, random_cost
from kvp.scoring import Needs, View
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
    """[L, H, grid] float64, E_b / W."""
    area: Tensor
    """[L, H] float64, mean over budgets 1..N-1 of E_b / W."""
    skill: Tensor
    """[L, H] float64, 1 = ideal, 0 = random; NaN where all tokens matter alike."""


@dataclass(frozen=True, kw_only=True)
class TraceRows:
    """Everything measured on the held-out traces of a store."""

    curves: tuple[Row, ...]
    """Rows of curves.jsonl."""
    kept: tuple[Row, ...]
    """Rows of kept.jsonl."""


@dataclass(frozen=True, kw_only=True)
class _Sums:
    """What is collected sequence by sequence."""

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
            cut = boundary(record, protocol)
            if 2 <= cut < record.length:
                prompt = TracedPrompt(trace, cut, config.device, model, tokenizer)
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
    """One sequence compressed at `cut` tokens."""

    def __init__(
        self,
        trace: Trace,
        cut: int,
        device: str = "cpu",
        model: PreTrainedModel | None = None,
        tokenizer: PreTrainedTokenizerBase | None = None,
    ) -> None:
        """Compute what its tokens are worth."""
        self.cut = cut
        queries = None if trace.queries is None else trace.queries.to(device)
        self._parts = (queries, trace.keys.to(device), trace.values.to(device))
        if queries is None:
            on_device = trace.future_attention(cut).to(device)
        else:
            on_device = future_attention(queries, self._parts[1], prefix_length=cut)
        self._future = on_device
        self.importance = on_device.cpu().double()
        """[L, H, cut] float64, future attention of every token."""
        self._token_ids = torch.tensor([trace.record.token_ids[:cut]], device=device)
        self._model = model
        self._tokenizer = tokenizer
        self._supplies: dict[int | None, ScorerInputs] = {}

    def scored(self, method: Method, budgets: Sequence[int]) -> list[Scored]:
        """What a method says at the budgets."""
        scorer = method.scorer
        assert scorer is not None, "the full cache has no scores"
        scorer_inputs = self._supply(scorer.needs) if needs_scorer_inputs(scorer.needs) else None
        queries, keys, values = self._parts

        def views_at(budget: int) -> Iterator[View]:
            return trace_views(
                queries, keys, values, self._future, self.cut, scorer.needs, budget, scorer_inputs
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

    def curve(self, scored: Sequence[Scored], protection: Protection) -> Measured:
        """Cost of every budget by the rankings of the grid's budgets."""
        lost = torch.zeros(*self.importance.shape[:-1], self.cut + 1, dtype=torch.float64)
        grid = set(grid_budgets(self.cut))
        done = -1
        for part in scored:
            served = [budget for budget in part.budgets if budget in grid]
            if served:
                curve = cost_curve(self.importance, Ranked(part, protection).ranking)
                last = self.cut if served[-1] == self.cut else served[-1]
                lost[..., done + 1 : last + 1] = curve[..., done + 1 : last + 1]
                done = last
        return measure(lost, self.importance)


def grid_budgets(tokens: int) -> list[int]:
    """Budgets at which methods that look at them are asked, ascending; the last is `tokens`."""
    steps = range(1, GRID_STEPS + 1)
    return sorted({max(1, round(step * tokens / GRID_STEPS)) for step in steps})


def _cells(config: EvalConfig, methods: Sequence[Method], cuts: Sequence[int]) -> list[Setting]:
    """What kept.jsonl has a row for: all but budgets below the protected tokens."""
    cells, _ = plan(
        methods,
        config.budget_list,
        protection="off" if config.protection == "off" else "both",
        protected_tokens=protection_of(config, protected=True).tokens,
        shortest=min(cuts),
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
    """Judge one scorer on one sequence: its rankings, and what all its allocators keep."""
    sizes = {cell: min(cell.tokens(prompt.cut), prompt.cut) for cell in cells}
    scored = prompt.scored(method, sorted({*grid_budgets(prompt.cut), *sizes.values()}))
    for protected in PROTECTIONS[config.protection]:
        protection = protection_of(config, protected=protected)
        measured = prompt.curve(scored, protection)
        sums.curves.setdefault((method, protected, protocol), []).append(measured)
        for part in scored:
            ranked = Ranked(part, protection)
            for cell in cells:
                if cell.protected is protected and sizes[cell] in part.budgets:
                    counts = ranked.counts(cell.method.rule, sizes[cell])
                    share = attention_recall(prompt.importance, ranked.ranking, counts)
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
