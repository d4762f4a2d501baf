"""Evaluate rankings on held-out traces: attention lost per head, at every budget.

No generation: queries, keys and values come from a trace store, importance from
`kvp.ops.future_attention`, scores from the same scorers that evict; those that need extra passes or
hidden states get them from the model, which runs over the stored tokens once more. The numbers
are those of `kvp.metrics`; `docs/formats.md` describes the file, curves.jsonl.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from eval.config import EvalConfig
from eval.methods import PROTECTIONS, Method, method_fields, protected_tokens, rankings
from eval.results.records import Record
from kvp import metrics
from kvp.errors import StoreError
from kvp.geometry import Geometry
from kvp.hf import Prefill, ScorerInputs, prefill
from kvp.hf.scorer_inputs import needs_scorer_inputs
from kvp.ops.future_attention import future_attention
from kvp.program.progress import Progress
from kvp.ranking import UNPROTECTED, Protection
from kvp.scoring import Needs, group_budgets, score_prompt
from kvp.store import SequenceRecord, Trace, TraceReader

GRID_STEPS = 64
"""A curve has one point per 1/64 of the cache, both ends included."""


def open_traces(path: str, geometry: Geometry) -> TraceReader:
    """The store of `--traces`; StoreError unless it gives curves for this geometry."""
    reader = TraceReader(path)
    if reader.geometry != geometry:
        raise StoreError(f"--traces {path} holds traces of {reader.geometry}, not of {geometry}")
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
    """Cached tokens at compression, as `eval.evaluate.Prompt.boundary` says."""
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


@dataclass(frozen=True, kw_only=True)
class Measured:
    """One ranking of one sequence. Leading axes: layer, KV head."""

    cost: Tensor
    """[L, H, grid] float64, share of attention lost at the budgets of the grid."""
    area: Tensor
    """[L, H] float64 (`kvp.metrics.area`)."""
    skill: Tensor
    """[L, H] float64 (`kvp.metrics.skill`); NaN for heads without signal."""


@torch.inference_mode()
def measure_traces(
    config: EvalConfig,
    methods: Sequence[Method],
    reader: TraceReader,
    model: PreTrainedModel | None = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
) -> list[Record]:
    """Records of curves.jsonl from the held-out sequences of a store.

    `model` and `tokenizer` serve methods that need more than traces hold.
    """
    protected = protected_tokens(config)
    measured: dict[tuple[Method, bool, str], list[Measured]] = {}
    records = held_out(reader)[: config.curve_sequences]
    usable = [  # what compresses before its last token
        (protocol, record)
        for protocol in protocols_apart(config.protocol_list, records)
        for record in records
        if 2 <= boundary(record, protocol) < record.length
    ]
    with Progress("cost curves", len(usable)) as progress:
        for protocol, record in progress.over(usable):
            trace = reader.trace(record.index)
            prompt = TracedPrompt(
                trace, boundary(record, protocol), config.device, model, tokenizer,
                layers=reader.geometry.model_layers,
            )  # fmt: skip
            for method in rankings(methods):
                scored = prompt.score(method, metrics.grid_budgets(prompt.prefix_length))
                for flag in PROTECTIONS[config.protection]:
                    costs = prompt.measure(scored, protected if flag else UNPROTECTED)
                    measured.setdefault((method, flag, protocol), []).append(costs)
    return [
        {"model": config.model_name, **record}
        for (method, flag, protocol), parts in measured.items()
        for record in _curve_records(reader.geometry, method, flag, protocol, parts)
    ]


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
        assert trace.queries is not None, "checked by open_traces"
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

    def score(self, method: Method, budgets: Sequence[int]) -> list[tuple[Tensor, int]]:
        """Scores of a method [L, H, N], and the largest of the `budgets` they are for."""
        scorer = method.scorer
        assert scorer is not None, "the full cache has no scores"
        needs = scorer.needs
        prompt = self._stored
        if needs_scorer_inputs(needs):
            assert self._model is not None, "methods that need extras need a model"
            recorded = Needs(hidden_after=needs.hidden_after, every_state=needs.every_state)
            if recorded not in self._inputs:  # one more prefill for all methods that agree
                seen = prefill(self._model, self._token_ids, recorded, tokenizer=self._tokenizer)
                self._inputs[recorded] = seen.inputs
            prompt = replace(prompt, inputs=self._inputs[recorded])
        return [
            (score_prompt(scorer, prompt.views(needs, max(group), future=self._future)), max(group))
            for group in group_budgets(needs, budgets)
        ]

    def measure(self, scored: Sequence[tuple[Tensor, int]], protection: Protection) -> Measured:
        """Metrics of the rankings made for the grid's budgets (`kvp.metrics.grid_budgets`)."""
        lost = metrics.lost_importance(self.importance, scored, protection)  # [L, H, N + 1]
        return Measured(
            cost=metrics.at_shares(lost, torch.linspace(0, 1, GRID_STEPS + 1)),
            area=metrics.area(lost),
            skill=metrics.skill(self.importance, lost, protection),
        )


def _curve_records(
    geometry: Geometry, method: Method, protected: bool, protocol: str, parts: Sequence[Measured]
) -> Iterator[Record]:
    """Means over sequences, head by head."""
    cost = torch.stack([part.cost for part in parts]).mean(0)
    area = torch.stack([part.area for part in parts]).mean(0)
    skill = torch.stack([part.skill for part in parts]).nanmean(0)  # NaN: no signal anywhere
    for layer in range(geometry.layers):
        for head in range(geometry.kv_heads):
            yield {
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
