"""Traces of a model that runs during training, in a buffer of bounded size.

A sequence is traced when it is first read, together with some of those that are read next, and
dropped when `capacity` newer ones have come; a dropped one is traced again, with the same result
but for rounding, so that what training reads is a function of the sequence's number. The buffer
keeps, as the plan says, either a sequence's queries or the importance at the points that training
will draw. What is left out: which sequences are read when (`train.online.schedule`).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, overload

import torch
from torch import Tensor

from kvp.geometry import Geometry
from kvp.store import SequenceRecord, StorePlan, Trace
from train.data.traces import Traces
from train.labels.label import label_of

Attention = tuple[str, int, int]
"""Label, prefix length and stop of one importance."""
Entry = tuple[Trace, dict[Attention, Tensor]]
"""What is kept of a sequence: its trace, and importance by point, [L, H, N] float32."""


@dataclass(frozen=True, kw_only=True)
class Tracing:
    """How sequences are traced."""

    traces: Callable[[Iterable[int]], Iterator[Trace]]
    """From numbers to the sequences with their queries, in the order in which they end.

    Each is a function of its number alone."""
    together: int
    """Sequences that are best traced at a time."""
    attention: Callable[[SequenceRecord], Iterable[Attention]]
    """Importance of a sequence that training will need, as far as it can be computed ahead."""
    manifest: dict[str, Any]
    """Names the model, as a trace store's does."""
    output_gram: Tensor | None
    """[L, H, D, D] float32 (`kvp.hf.output_projection`); None where unknown."""


class ModelTraces:
    """Traces by number, as `train.data.traces.Traces`; safe to share between threads."""

    in_memory = True

    def __init__(
        self,
        tracing: Tracing,
        plan: StorePlan,
        *,
        capacity: int,
        pinned: range = range(0),
        device: torch.device | None = None,
        heads: slice | None = None,
    ) -> None:
        """Hold at most `capacity` sequences next to the `pinned` ones, which never leave.

        Attention is computed on `device`. With `heads`, consecutive KV heads counted layer by
        layer, only theirs is kept, as a trace store's reader does.
        """
        self._tracing = tracing
        self._plan = plan
        self._capacity = capacity
        self._pinned = pinned
        self._device = device or torch.device("cpu")
        self._heads = heads
        self._entries: dict[int, Entry] = {}
        self._coming: Sequence[int] = ()
        self._turn = threading.RLock()
        self.traced = 0
        """Sequences traced so far."""
        self.tokens = 0
        """Their tokens."""

    @property
    def geometry(self) -> Geometry:
        """Head geometry of the model."""
        return self._plan.geometry

    @property
    def plan(self) -> StorePlan:
        """Tensors kept per sequence: queries, or attention in their place."""
        return self._plan

    @property
    def manifest(self) -> dict[str, Any]:
        """Names the model."""
        return self._tracing.manifest

    @property
    def used_bytes(self) -> int:
        """Bytes of all tensors in the buffer."""
        with self._turn:
            return sum(_bytes(trace, attention) for trace, attention in self._entries.values())

    @property
    def sequences(self) -> list[int]:
        """Numbers of the sequences in the buffer, ascending."""
        with self._turn:
            return sorted(self._entries)

    def record(self, index: int) -> SequenceRecord:
        """Record of one sequence."""
        return self._sequence(index)[0].record

    def kv(self, index: int) -> tuple[Tensor, Tensor]:
        """Keys and values of one sequence, [L, H, T, D] each."""
        trace, _ = self._sequence(index)
        return trace.keys, trace.values

    def trace(self, index: int) -> Trace:
        """One sequence, with queries where the plan keeps them."""
        return self._sequence(index)[0]

    def label(self, name: str, index: int) -> Tensor:
        """A label of the prompt of one sequence that the plan names, [L, H, P] float32."""
        return self._sequence(index)[0].labels[name]

    def output_gram(self) -> Tensor | None:
        """Gram matrices of the model's output projection, [L, H, D, D] float32; None if unknown."""
        gram = self._tracing.output_gram
        return gram if gram is None or self._heads is None else self._trained_heads(gram)

    def importance(
        self, label: str, index: int, prefix_length: int, stop: int | None = None
    ) -> Tensor:
        """A label of the first N = `prefix_length` tokens, of the queries before `stop` (all).

        [L, H, N] float32. What was not computed ahead takes another run of the model.
        """
        trace, computed = self._sequence(index)
        point = (label, prefix_length, trace.record.length if stop is None else stop)
        if point in computed:
            return computed[point]
        with self._turn:
            (again,) = self._traced([index])
            return self._computed(again, [point])[point]

    def expect(self, numbers: Sequence[int]) -> None:
        """Say which sequences are read next, in this order."""
        self._coming = numbers

    def trace_all(self, numbers: Sequence[int]) -> None:
        """Trace sequences that will be read.

        No more of them than the buffer holds next to the pinned ones.
        """
        with self._turn:
            missing = [number for number in numbers if number not in self._entries]
            for number, entry in self._made(missing):
                self._hold(number, entry)

    def _sequence(self, number: int) -> Entry:
        with self._turn:
            entry = self._entries.get(number)
            if entry is None:
                most = min(self._tracing.together, self._capacity)
                for one, made in self._made([number, *self._following(number)][:most]):
                    self._hold(one, made)
                    entry = made if one == number else entry
            assert entry is not None
            return entry

    def _following(self, number: int) -> list[int]:
        """Sequences that are read after this one and are not in the buffer."""
        if number not in self._coming:
            return []
        later = self._coming[self._coming.index(number) + 1 :]
        return [one for one in later if one not in self._entries]

    def _hold(self, number: int, entry: Entry) -> None:
        """Put a sequence into the buffer; the oldest makes room for it."""
        self._entries[number] = entry
        passing = [n for n in self._entries if n not in self._pinned]
        if len(passing) > self._capacity:
            del self._entries[min(passing)]

    def _made(self, numbers: Iterable[int]) -> Iterator[tuple[int, Entry]]:
        for trace in self._traced(numbers):
            yield trace.record.index, self._kept(trace)

    def _traced(self, numbers: Iterable[int]) -> Iterator[Trace]:
        """Trace sequences and keep the heads that are trained."""
        for trace in self._tracing.traces(numbers):
            self.traced += 1
            self.tokens += trace.record.length
            yield self._with_trained_heads(trace)

    def _with_trained_heads(self, trace: Trace) -> Trace:
        if self._heads is None:
            return trace
        assert trace.queries is not None
        return replace(
            trace,
            queries=self._trained_heads(trace.queries),
            keys=self._trained_heads(trace.keys),
            values=self._trained_heads(trace.values),
            labels={name: self._trained_heads(label) for name, label in trace.labels.items()},
        )

    def _trained_heads(self, tensor: Tensor) -> Tensor:
        """[L, H, ...] -> [1, trained heads, ...], a copy."""
        return tensor.flatten(0, 1)[self._heads][None].clone()

    def _kept(self, trace: Trace) -> Entry:
        """The tensors of a sequence that the plan keeps."""
        if self._plan.store_queries:
            return trace, {}
        needed = tuple(dict.fromkeys(self._tracing.attention(trace.record)))
        return replace(trace, queries=None), self._computed(trace, needed)

    def _computed(self, trace: Trace, needed: Sequence[Attention]) -> dict[Attention, Tensor]:
        assert trace.queries is not None
        queries, keys = trace.queries.to(self._device), trace.keys.to(self._device)
        computed: dict[Attention, Tensor] = {}
        for name, prefix_length, stop in needed:
            label, replies = label_of(name), trace.record.reply_spans
            importance = label.computed(queries, keys, prefix_length, stop, replies)
            computed[name, prefix_length, stop] = importance.cpu()
        return computed


@dataclass(frozen=True)
class RecordWindow(Sequence[SequenceRecord]):
    """Records of sequences by number, each looked up when it is read."""

    traces: Traces
    numbers: Sequence[int]

    def __len__(self) -> int:
        return len(self.numbers)

    @overload
    def __getitem__(self, index: int) -> SequenceRecord: ...
    @overload
    def __getitem__(self, index: slice) -> RecordWindow: ...
    def __getitem__(self, index: int | slice) -> SequenceRecord | RecordWindow:
        """The record at an index, or the window of a slice."""
        if isinstance(index, slice):
            return RecordWindow(self.traces, self.numbers[index])
        return self.traces.record(self.numbers[index])


def _bytes(trace: Trace, attention: dict[Attention, Tensor]) -> int:
    tensors = [trace.keys, trace.values, *trace.labels.values(), *attention.values()]
    if trace.queries is not None:
        tensors.append(trace.queries)
    return sum(tensor.nbytes for tensor in tensors)
