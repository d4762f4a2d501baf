"""Traces of a model that ran before training, kept in RAM in place of a store."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from kvp.geometry import Geometry
from kvp.store import SequenceRecord, StorePlan, Trace
from train.data.labels import label_of

Attention = tuple[str, int, int]
"""Label, prefix length and stop of one importance."""


@dataclass(frozen=True, kw_only=True)
class ModelTraces:
    """Traces by number, with what training reads of a `kvp.store.TraceReader`."""

    in_memory: ClassVar[bool] = True
    plan: StorePlan
    manifest: dict[str, Any]
    """Names the model, as a trace store's does."""
    gram: Tensor | None
    """[L, H, D, D] float32 (`kvp.hf.model_access`) of the model; None where unknown."""
    attention: Callable[[SequenceRecord], Iterable[Attention]]
    """Importance of a sequence that will be asked for."""
    device: torch.device
    """Where importance is computed."""
    heads: range
    """KV heads that are kept, counted layer by layer."""
    _kept: dict[int, tuple[Trace, dict[Attention, Tensor]]] = field(default_factory=dict)

    @property
    def geometry(self) -> Geometry:
        """Head geometry of the model."""
        return self.plan.geometry

    def keep(self, trace: Trace) -> SequenceRecord:
        """Keep what the plan says of a sequence with its queries; returns its record."""
        assert trace.queries is not None, "a model's traces have queries"
        queries = self._trained_heads(trace.queries)
        trace = replace(
            trace,
            queries=queries,
            keys=self._trained_heads(trace.keys),
            values=self._trained_heads(trace.values),
            labels={name: self._trained_heads(label) for name, label in trace.labels.items()},
        )
        computed: dict[Attention, Tensor] = {}
        if not self.plan.store_queries:
            queries, keys = queries.to(self.device), trace.keys.to(self.device)
            for name, prefix_length, stop in dict.fromkeys(self.attention(trace.record)):
                given = (queries, keys, prefix_length, stop, trace.record.reply_spans)
                computed[name, prefix_length, stop] = label_of(name).importance_of(*given).cpu()
            trace = replace(trace, queries=None)
        self._kept[trace.record.index] = trace, computed
        return trace.record

    def record(self, index: int) -> SequenceRecord:
        """Record of one sequence."""
        return self.trace(index).record

    def kv(self, index: int) -> tuple[Tensor, Tensor]:
        """Keys and values of one sequence, [L, H, T, D] each."""
        trace = self.trace(index)
        return trace.keys, trace.values

    def trace(self, index: int) -> Trace:
        """One sequence, with queries where the plan keeps them."""
        return self._kept[index][0]

    def label(self, name: str, index: int) -> Tensor:
        """A label of the prompt of one sequence that the plan names, [L, H, P] float32."""
        return self.trace(index).labels[name]

    def output_gram(self) -> Tensor | None:
        """Gram matrices of the model's output projection, [L, H, D, D] float32; None if unknown."""
        return None if self.gram is None else self._trained_heads(self.gram)

    def importance(
        self, label: str, index: int, prefix_length: int, stop: int | None = None
    ) -> Tensor | None:
        """A label of the first N = `prefix_length` tokens, of the queries before `stop` (all).

        [L, H, N] float32, None where queries are kept. KeyError where `attention` did not name it.
        """
        if self.plan.store_queries:
            return None
        trace, computed = self._kept[index]
        return computed[label, prefix_length, trace.record.length if stop is None else stop]

    def _trained_heads(self, tensor: Tensor) -> Tensor:
        """[L, H, ...] -> [1, trained heads, ...], a copy; all heads as they are."""
        if len(self.heads) == self.geometry.total_kv_heads:
            return tensor
        return tensor.flatten(0, 1)[self.heads.start : self.heads.stop][None].clone()
