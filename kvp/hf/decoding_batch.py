"""Answers in progress: sequences of different lengths in one cache, each fed one token at a time.

Rows join and leave between two steps. Each keeps its true positions; slots that hold nothing, since
other rows are longer, are seen by no query (`kvp.hf.cache.dense`). Left out: which tokens are fed
and when a row ends (`kvp.hf.answers`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from transformers import PreTrainedModel

from kvp.hf.attention import kvp_attention_set
from kvp.hf.cache import EvictingCache
from kvp.hf.cache.base import LayerState
from kvp.hf.cache.dense import EvictingLayer
from kvp.hf.layer_kinds import OtherLayer, arranged, copies
from kvp.hf.observe import Observation
from kvp.hf.wrappers import unwrapped

_SPARE = 32
"""Columns for new tokens in a batch that was just put together; a full one gets more."""


@dataclass(frozen=True, kw_only=True)
class Prefix:
    """What a model holds of a sequence of N tokens, without padding."""

    keys: tuple[Tensor, ...]
    """Per layer [1, H, N, D]."""
    values: tuple[Tensor, ...]
    """Per layer [1, H, N, D]."""
    others: Mapping[int, OtherLayer] = field(default_factory=dict)
    """Caches of the layers that nothing is evicted from: index in the model -> cache."""

    @property
    def length(self) -> int:
        """N, tokens."""
        return self.keys[0].shape[2]

    @classmethod
    def of(cls, seen: Observation) -> Prefix:
        """All tokens that a model was fed."""
        return cls(keys=seen.keys, values=seen.values, others=seen.others)

    def cache(self) -> EvictingCache:
        """A cache that goes on from here; this prefix stays as it is."""
        positions = torch.arange(self.length, device=self.keys[0].device)[None]  # [1, N]
        layers = []
        for index, (keys, values) in enumerate(zip(self.keys, self.values, strict=True)):
            tensors = {"keys": keys, "values": values, "positions": positions[:, None]}
            if index == 0:
                tensors["newest"] = positions[:, -1]
            layers.append(
                EvictingLayer.of_state(
                    LayerState(tensors=tensors, seen=self.length, evicted=False, gaps=False)
                )
            )
        return EvictingCache(arranged(layers, copies(self.others)))


@dataclass
class _Row:
    """Where the tokens of a row are: in the first columns, and in all from `joined` on."""

    first: int
    joined: int

    def length(self, columns: int) -> int:
        return self.first + columns - self.joined


class DecodingBatch:
    """A batch of sequences that are continued token by token; empty at first.

    A model with layers that nothing is evicted from continues one sequence at a time: transformers
    offers no way to put windows and recurrent states of different lengths into one cache.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = unwrapped(model)
        self._cache: EvictingCache | None = None
        self._rows: list[_Row] = []

    def __len__(self) -> int:
        return len(self._rows)

    @torch.no_grad()
    def arrange(self, kept: Sequence[int], arrivals: Sequence[Prefix]) -> None:
        """Make rows `kept` and then `arrivals` the batch; all other rows leave it."""
        rows = [self._rows[row] for row in kept]
        if not rows and not arrivals:
            self._cache, self._rows = None, []
            return
        others = next((prefix.others for prefix in arrivals if prefix.others), {})
        assert not others or len(rows) + len(arrivals) == 1
        before = [] if self._cache is None else list(self._cache.stored.values())
        columns = self.columns if before else 0
        layers = []
        for index in range(len(before) or len(arrivals[0].keys)):
            entries = []
            for row, place in zip(kept, rows, strict=True):
                spans = (slice(0, place.first), slice(place.joined, columns))
                held = before[index]
                entries.append(
                    (
                        [held.keys[row, :, span] for span in spans],
                        [held.values[row, :, span] for span in spans],
                    )
                )
            entries += [([one.keys[index][0]], [one.values[index][0]]) for one in arrivals]
            layers.append(EvictingLayer.of_sequences(entries, spare=_SPARE))
        lengths = [row.length(columns) for row in rows] + [one.length for one in arrivals]
        self._rows = [_Row(length, max(lengths)) for length in lengths]
        self._cache = EvictingCache(arranged(layers, copies(others)))

    @torch.no_grad()
    def step(self, tokens: Sequence[int]) -> list[int]:
        """Feed each row its token; the most likely next token of each."""
        assert self._cache is not None
        columns = self.columns
        device = self._model.device
        places = [[row.length(columns)] for row in self._rows]
        with kvp_attention_set(self._model):
            output = self._model(
                input_ids=torch.tensor(tokens, device=device)[:, None],
                position_ids=torch.tensor(places, device=device),
                past_key_values=self._cache,
                use_cache=True,
                logits_to_keep=1,
            )
        chosen: list[int] = output.logits[:, -1].argmax(-1).tolist()
        return chosen

    def prefix(
        self, row: int, length: int, others: Mapping[int, OtherLayer] | None = None
    ) -> Prefix:
        """The first `length` tokens of a row as it joined; shares memory with the batch."""
        assert self._cache is not None
        assert length <= self._rows[row].first
        layers = self._cache.stored.values()
        return Prefix(
            keys=tuple(layer.keys[row : row + 1, :, :length] for layer in layers),
            values=tuple(layer.values[row : row + 1, :, :length] for layer in layers),
            others=others or {},
        )

    @property
    def columns(self) -> int:
        """Slots of the cache that are in use, of the row with most."""
        assert self._cache is not None
        return next(iter(self._cache.stored.values())).keys.shape[2]
