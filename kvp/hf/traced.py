"""A sequence that was traced, its tensors still on their way to the host's memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from kvp.hf.host_copies import OnHost
from kvp.store import SequenceRecord, Trace


@dataclass(frozen=True, kw_only=True)
class Traced:
    """What `trace` puts together, in any thread."""

    record: SequenceRecord
    keys: OnHost
    """Per layer [1, H, T, D]."""
    values: OnHost
    """Per layer [1, H, T, D]."""
    queries: Sequence[OnHost] = ()
    """Pieces of the sequence, each per layer [1, Q, tokens, D]; none where they are not kept."""
    grids: Mapping[str, OnHost] = field(default_factory=dict)
    """Per label one tensor, as a trace has it."""
    labels: Mapping[str, Tensor] = field(default_factory=dict)
    """As a trace has them."""

    def trace(self) -> Trace:
        """The trace; waits for the tensors."""
        keys = _stacked(self.keys.tensors())
        return Trace(
            record=self.record,
            grids={label: grid.tensors()[0] for label, grid in self.grids.items()},
            queries=self._queries(keys) if self.queries else None,
            keys=keys,
            values=_stacked(self.values.tensors()),
            labels=self.labels,
        )

    def _queries(self, keys: Tensor) -> Tensor:
        """Queries of all pieces [L, H, G, T, D], next to keys [L, H, T, D]."""
        layers, heads, tokens, _ = keys.shape
        pieces = [piece.tensors() for piece in self.queries]
        _, query_heads, _, width = pieces[0][0].shape
        whole = keys.new_empty(layers, heads, query_heads // heads, tokens, width)
        start = 0
        for piece in pieces:
            stop = start + piece[0].shape[2]
            for layer, queries in zip(whole, piece, strict=True):
                layer[:, :, start:stop] = queries[0].view(heads, -1, stop - start, width)
            start = stop
        return whole


def _stacked(layers: tuple[Tensor, ...]) -> Tensor:
    """Layers of [1, H, T, D] as [L, H, T, D]."""
    return torch.cat(layers)
