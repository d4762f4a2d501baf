"""A trace store that a model adds to: what is missing is traced and written when it is first read.

Some of the sequences that are read next are traced with it, in a batch.

Everything is read from the store, so that a run trains on the same bits whether it, another process
or kvp-collect wrote them. Processes and jobs fill one store together (`train.online.shared_work`).
What is left out: which sequences a store has (`train.online.store_filling`).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from kvp.artifacts.addresses import Place
from kvp.geometry import Geometry
from kvp.ranks import Rank
from kvp.store import SequenceRecord, StorePlan, Trace, TraceReader, TraceWriter
from kvp.store.sequence_records import committed
from train.online.shared_work import SharedWork


@dataclass(frozen=True, kw_only=True)
class Filling:
    """How a store is begun, and where its sequences come from."""

    manifest: dict[str, Any]
    """As `TraceWriter.create_or_resume` takes it."""
    output_gram: Tensor | None
    """[L, H, D, D] float32 (`kvp.hf.output_projection`); None where unknown."""
    traces: Callable[[Iterable[int]], Iterator[Trace]]
    """From indices of the store to the sequences, in the order in which they end."""
    together: int
    """Sequences that are best traced at a time."""


class FilledTraces:
    """Traces by index, as `train.data.traces.Traces`; safe to share between threads."""

    in_memory = False

    def __init__(
        self,
        path: Place,
        plan: StorePlan,
        filling: Filling | None,
        *,
        rank: Rank,
        heads: slice | None = None,
    ) -> None:
        """Touch nothing yet.

        Args:
            path: the store.
            plan: its plan.
            filling: how it is begun and filled; None where nothing is missing.
            rank: which of the processes that fill the store this is.
            heads: as of `TraceReader`.
        """
        self.plan = plan
        self._path = path
        self._filling = filling
        self._heads = heads
        self._rank = rank
        there = committed(path) if path.is_dir() else []
        self._missing = set() if filling is None else {*range(plan.sequences)} - {*there}
        """Sequences that are read and are not known to be there."""
        self._coming: Sequence[int] = ()
        self._turn = threading.RLock()
        self._opened: TraceReader | None = None
        self._writer: TraceWriter | None = None

    @property
    def geometry(self) -> Geometry:
        """Head geometry of the model."""
        return self.plan.geometry

    @property
    def manifest(self) -> dict[str, Any]:
        """The store's, or what it will be."""
        if self._filling is not None and self._opened is None:
            return self._filling.manifest
        return self._reader().manifest

    def record(self, index: int) -> SequenceRecord:
        """Record of one sequence."""
        return self._with(index).record(index)

    def kv(self, index: int) -> tuple[Tensor, Tensor]:
        """Keys and values of one sequence, [L, H, T, D] each."""
        return self._with(index).kv(index)

    def trace(self, index: int) -> Trace:
        """One sequence, with what the store keeps."""
        return self._with(index).trace(index)

    def label(self, name: str, index: int) -> Tensor:
        """A label of the prompt that is stored with the trace, [L, H, P] float32."""
        return self._with(index).label(name, index)

    def importance(
        self, label: str, index: int, prefix_length: int, stop: int | None = None
    ) -> Tensor:
        """Importance kept in place of queries, [L, H, N] float32."""
        return self._with(index).importance(label, index, prefix_length, stop)

    def output_gram(self) -> Tensor | None:
        """Gram matrices of the model's output projection, as of `TraceReader`."""
        return self._reader().output_gram()

    def need(self, numbers: Sequence[int], order: Sequence[int]) -> None:
        """Say which sequences will be read: when they are there, the model is let go.

        `order` are those that are read one after the other, in their order.
        """
        with self._turn:
            self._coming = order
            self._missing.intersection_update(numbers)
            self._are_there([])

    def trace_all(self, numbers: Sequence[int]) -> None:
        """See to it that sequences are there, each traced by one of the processes that fill."""
        with self._turn:
            missing = [number for number in numbers if number in self._missing]
            if missing:
                self._work().all(missing)
                self._are_there(missing)

    def close(self) -> None:
        """Let other writers in, and the model go; what is missing then cannot be read."""
        with self._turn:
            if self._writer is not None:
                self._writer.close()
            self._writer = self._filling = None

    def _with(self, index: int) -> TraceReader:
        """The store, with a sequence in it."""
        if index in self._missing:
            with self._turn:
                if index in self._missing:
                    self._work().one(index, self._following(index))
                    self._are_there([index])
        return self._reader()

    def _following(self, index: int) -> list[int]:
        """Sequences that are read after this one and are not known to be there."""
        if index not in self._coming:
            return []
        later = self._coming[self._coming.index(index) + 1 :]
        return [one for one in later if one in self._missing]

    def _are_there(self, numbers: Sequence[int]) -> None:
        self._missing.difference_update(numbers)
        if not self._missing and self._filling is not None:
            self._reader()  # before the manifest of the filling goes
            self.close()

    def _reader(self) -> TraceReader:
        if self._opened is None:
            self._opened = TraceReader(self._path, heads=self._heads)
        return self._opened

    def _work(self) -> SharedWork:
        filling = self._filling
        assert filling is not None, "closed"
        if self._writer is None:
            self._writer = TraceWriter.create_or_resume(
                self._path, self.plan, filling.manifest, filling.output_gram, shared=True
            )
        writer = self._writer

        def written(indices: Iterable[int]) -> Iterator[int]:
            for trace in filling.traces(indices):
                writer.write(trace)
                yield trace.record.index

        return SharedWork(
            is_there=writer.has,
            claim=writer.claim,
            make=written,
            together=filling.together,
            rank=self._rank,
            pause_seconds=writer.pause_seconds,
        )
