"""Evaluate rankings on held-out traces: attention lost per head, attention recall of the model.

No generation: queries, keys and values come from a trace store, importance from
`kvp.ops.future_attention`, scores from the same scorers that evict; those that need extra passes or
hidden states get them from the model, which runs over the stored tokens once more. Rankings are
measured head by head (curves.jsonl), budgets split over heads by what all heads keep together
(kept.jsonl). The numbers are those of `kvp.metrics`; `docs/formats.md` describes the files.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from eval.held_out_traces import boundary, held_out, protocols_apart, stored_prefill
from eval.methods import Method, method_fields, rankings
from eval.results.records import Record
from eval.settings import PROTECTIONS, Setting, plan
from eval.stats import bootstrap_mean
from kvp import metrics
from kvp.budget_scores import BudgetScores, score_budgets
from kvp.budgets import Budget
from kvp.geometry import Geometry
from kvp.hf import ScorerInputs, prefill
from kvp.hf.scorer_inputs import needs_scorer_inputs
from kvp.ops.future_attention import future_attention
from kvp.ranking import UNPROTECTED, Protection
from kvp.reward import cost_curve
from kvp.scoring import Needs
from kvp.selection import Selection
from kvp.store import SequenceRecord, Trace, TraceReader

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
class TraceRecords:
    """Everything measured on the held-out traces of a store."""

    curves: tuple[Record, ...]
    """Records of curves.jsonl."""
    kept: tuple[Record, ...]
    """Records of kept.jsonl."""


@dataclass(frozen=True, kw_only=True)
class _Sums:
    """Measurements, sequence by sequence."""

    curves: dict[tuple[Method, bool, str], list[Measured]] = field(default_factory=dict)
    kept: dict[tuple[Setting, str], list[AttentionRecall]] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class TraceSettings:
    """Settings of the measurement, the same for every sequence."""

    model: str
    """Name of the model in every record."""
    budgets: tuple[Budget, ...]
    """Budgets of kept.jsonl; curves have all budgets."""
    protocols: tuple[str, ...]
    protection: str
    """`both`, `on` or `off`."""
    protected: Protection
    """Tokens that protection keeps."""
    sequences: int
    """Maximum number of held-out sequences."""
    bootstrap: int
    """Resamples behind each interval."""
    seed: int
    device: str = "cpu"


@dataclass(frozen=True, kw_only=True)
class AttentionRecall:
    """One setting on one sequence."""

    share: float
    """Mean over heads of the share of future attention kept, 0 to 1."""
    kept_tokens: float
    """Tokens kept per KV head, mean over heads."""
    cached_tokens: int
    """N, tokens before the eviction."""


def attention_recall(importance: Tensor, ranking: Tensor, counts: Tensor) -> AttentionRecall:
    """Recall of importance [L, H, N] by the first counts [L, H] of every ranking [L, H, N].

    A head whose tokens receive nothing at all loses nothing: its share is 1.
    """
    recall = metrics.attention_recall(cost_curve(importance, ranking), counts)  # [L, H]
    return AttentionRecall(
        share=float(recall.mean()),
        kept_tokens=float(counts.double().mean()),
        cached_tokens=importance.shape[-1],
    )


def kept_record(
    setting: Setting,
    parts: Sequence[AttentionRecall],
    *,
    model: str,
    protocol: str,
    bootstrap: int,
    seed: int,
) -> Record:
    """One line of kept.jsonl: means over sequences, and the interval of the recall."""
    values = {("", str(number)): part.share for number, part in enumerate(parts)}
    interval = bootstrap_mean({None: values}, bounds=None, resamples=bootstrap, seed=seed)
    return {
        "model": model,
        **method_fields(setting.method),
        "protected": setting.protected,
        "protocol": protocol,
        "budget_spec": setting.spec,
        "kept": interval.mean,
        "low": max(0.0, interval.low),
        "high": min(1.0, interval.high),
        "kept_tokens": sum(part.kept_tokens for part in parts) / len(parts),
        "cached_tokens": sum(part.cached_tokens for part in parts) / len(parts),
        "sequences": len(parts),
    }


def usable_records(
    reader: TraceReader, settings: TraceSettings
) -> dict[str, tuple[SequenceRecord, ...]]:
    """Held-out sequences that compress before their last token, by protocol to measure."""
    records = held_out(reader)[: settings.sequences]
    return {
        protocol: tuple(r for r in records if 2 <= boundary(r, protocol) < r.length)
        for protocol in protocols_apart(settings.protocols, records)
    }


@torch.inference_mode()
def measure_traces(
    settings: TraceSettings,
    methods: Sequence[Method],
    reader: TraceReader,
    model: PreTrainedModel | None = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
    *,
    advance: Callable[[], None] = lambda: None,
) -> TraceRecords:
    """Records from the held-out sequences of a store.

    `model` and `tokenizer` serve methods that need more than traces hold; `advance` is called after
    every sequence and protocol.
    """
    methods = [method for method in methods if method.scorer is not None]
    sums = _Sums()
    for protocol, records in usable_records(reader, settings).items():
        planned = _settings_of(settings, methods, [boundary(r, protocol) for r in records])
        for record in records:
            trace = reader.trace(record.index)
            prompt = TracedPrompt(
                trace, boundary(record, protocol), settings.device, model, tokenizer,
                layers=reader.geometry.model_layers,
            )  # fmt: skip
            for method in rankings(methods):
                same = [each for each in planned if each.method.ranking == method.ranking]
                _measure(settings, prompt, method, same, protocol, sums)
            advance()
    return TraceRecords(
        curves=tuple(
            record
            for (method, protected, protocol), parts in sums.curves.items()
            for record in _curve_records(
                settings, reader.geometry, method, protected, protocol, parts
            )
        ),
        kept=tuple(
            kept_record(
                setting, parts, model=settings.model, protocol=protocol,
                bootstrap=settings.bootstrap, seed=settings.seed,
            )
            for (setting, protocol), parts in sums.kept.items()
        ),
    )  # fmt: skip


class TracedPrompt:
    """One sequence compressed after its first `prefix_length` tokens."""

    def __init__(
        self,
        trace: Trace,
        prefix_length: int,
        device: str = "cpu",
        model: PreTrainedModel | None = None,
        tokenizer: PreTrainedTokenizerBase | None = None,
        layers: Sequence[int] | None = None,
    ) -> None:
        """Compute the importance of its tokens; `layers` are as `Geometry.model_layers`."""
        self.prefix_length = prefix_length
        self._stored = stored_prefill(trace, prefix_length, device, layers)
        assert trace.queries is not None, "checked by eval.held_out_traces.open_traces"
        future = future_attention(
            trace.queries.to(device), trace.keys.to(device), prefix_length=prefix_length
        )
        self._future = [layer[None] for layer in future]  # per layer [1, H, N]
        self.importance = future.cpu().double()
        """[L, H, N] float64, future attention of every token."""
        seen = trace.record.token_ids[: prefix_length + self._stored.fed_again]
        self._token_ids = torch.tensor([seen], device=device)
        self._model = model
        self._tokenizer = tokenizer
        self._inputs: dict[Needs, ScorerInputs | None] = {}

    def scored(self, method: Method, budgets: Sequence[int]) -> list[BudgetScores]:
        """Scores of a method for the budgets."""
        scorer = method.scorer
        assert scorer is not None, "the full cache has no scores"
        needs = scorer.needs
        prompt = self._stored
        if needs_scorer_inputs(needs):
            prompt = replace(prompt, inputs=self._scorer_inputs(needs))
        return score_budgets(
            scorer, lambda budget: prompt.views(needs, budget, future=self._future), budgets
        )

    def _scorer_inputs(self, needs: Needs) -> ScorerInputs | None:
        """Extras of the stored tokens, from one more prefill; shared by the methods that agree."""
        assert self._model is not None, "methods that need extras need a model"
        recorded = Needs(hidden_after=needs.hidden_after, every_state=needs.every_state)
        if recorded not in self._inputs:
            seen = prefill(self._model, self._token_ids, recorded, tokenizer=self._tokenizer)
            self._inputs[recorded] = seen.inputs
        return self._inputs[recorded]

    def measure(self, scored: Sequence[BudgetScores], protection: Protection) -> Measured:
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


def _settings_of(
    settings: TraceSettings, methods: Sequence[Method], lengths: Sequence[int]
) -> list[Setting]:
    """Settings that kept.jsonl has a record for."""
    if not lengths:
        return []
    planned, _ = plan(
        methods, settings.budgets, lengths,
        protection="off" if settings.protection == "off" else "both",
        protected=settings.protected,
    )  # fmt: skip
    return [each for each in planned if each.protected in PROTECTIONS[settings.protection]]


def _measure(
    settings: TraceSettings,
    prompt: TracedPrompt,
    method: Method,
    planned: Sequence[Setting],
    protocol: str,
    sums: _Sums,
) -> None:
    """Measure one scorer on one sequence: its rankings, and what all its allocators keep."""
    sizes = {each: min(each.tokens(prompt.prefix_length), prompt.prefix_length) for each in planned}
    grid = metrics.grid_budgets(prompt.prefix_length)
    scored = prompt.scored(method, sorted({*grid, *sizes.values()}))
    for protected in PROTECTIONS[settings.protection]:
        protection = settings.protected if protected else UNPROTECTED
        measured = prompt.measure(scored, protection)
        sums.curves.setdefault((method, protected, protocol), []).append(measured)
        for part in scored:
            matching = [
                each for each in planned
                if each.protected is protected and sizes[each] in part.budgets
            ]  # fmt: skip
            if not matching:
                continue
            selection = Selection(part.scores, protection, part.sizes)
            for each in matching:
                counts = selection.counts(sizes[each], each.method.rule)
                recall = attention_recall(prompt.importance, selection.ranking, counts)
                sums.kept.setdefault((each, protocol), []).append(recall)


def _curve_records(
    settings: TraceSettings,
    geometry: Geometry,
    method: Method,
    protected: bool,
    protocol: str,
    parts: Sequence[Measured],
) -> Iterator[Record]:
    """Means over sequences, head by head."""
    cost = torch.stack([part.cost for part in parts]).mean(0)
    area = torch.stack([part.area for part in parts]).mean(0)
    skill = torch.stack([part.skill for part in parts]).nanmean(0)  # NaN: no signal anywhere
    for layer in range(geometry.layers):
        for head in range(geometry.kv_heads):
            yield {
                "model": settings.model,
                **method_fields(method),
                "protected": protected,
                "protocol": protocol,
                "layer": geometry.model_layers[layer],
                "head": head,
                "budgets": [step / GRID_STEPS for step in range(GRID_STEPS + 1)],
                "cost": cost[layer, head].tolist(),
                "skill": None if skill[layer, head].isnan() else float(skill[layer, head]),
                "area": float(area[layer, head]),
                "metrics_version": metrics.METRICS_VERSION,
                "sequences": len(parts),
            }
