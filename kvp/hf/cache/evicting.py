"""A transformers cache whose layers drop entries physically and still report the true length.

`get_seq_length` is the number of tokens seen (padding columns included, as transformers counts), so
positions stay true and `generate` feeds exactly the new tokens; `get_mask_sizes` is what is stored.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from kvp.errors import UsageError
from kvp.hf.attention import QueryRecorder, StoredKeys
from kvp.hf.cache.base import StoredLayer
from kvp.hf.cache.dense import EvictingLayer, selected_layer


@dataclass(frozen=True, kw_only=True)
class Turn:
    """What was decided when the latest prompt was read."""

    budgets: tuple[int, ...]
    """Tokens per KV head of each batch entry."""
    prompts: tuple[int, ...]
    """Tokens of each batch entry up to the end of the prompt, earlier turns included."""
    shrunk_at: int
    """Tokens the cache had seen when it was shrunk the last time."""

    def taken(self, entries: Sequence[int]) -> Turn:
        """The same for other entries of the batch."""
        return replace(
            self,
            budgets=tuple(self.budgets[entry] for entry in entries),
            prompts=tuple(self.prompts[entry] for entry in entries),
        )


class EvictingCache(Cache):
    """The layers of a model; empty until its first forward pass, like a `DynamicCache`."""

    layers: list[StoredLayer]  # type: ignore[assignment]

    def __init__(self, layers: Sequence[StoredLayer] = ()) -> None:
        """Start from `layers`, or empty: layers then appear as the model feeds them."""
        super().__init__(layers=list(layers))
        self.recorder: QueryRecorder | None = None
        """Receives the queries of every forward pass while it is set."""
        self.turn: Turn | None = None
        """How much of it stays until the next prompt; None before the first one was read."""

    @classmethod
    def adopt(cls, cache: Cache) -> EvictingCache:
        """Turn an empty cache object itself into an `EvictingCache`.

        So the cache that a caller passed as `past_key_values` is the one that is filled.
        """
        assert cache.get_seq_length() == 0
        vars(cache).clear()
        cache.__class__ = cls
        cls.__init__(cache)  # type: ignore[arg-type]
        assert isinstance(cache, EvictingCache)
        return cache

    @classmethod
    def select(
        cls,
        keys: Sequence[Tensor],
        values: Sequence[Tensor],
        indices: Sequence[Tensor],
        seen: int,
        bias: Sequence[Tensor] | None = None,
    ) -> EvictingCache:
        """Build a cache of R entries from a prefill, each entry and head with its own kept tokens.

        Per layer: keys and values [1 or R, H, N, D] (one serves all R), indices int64 [R, H, S]
        into the N tokens, whose positions are 0..N-1; -1 means no token. A layer with a -1
        stores each head at its own length (`RaggedLayer`), any other is one dense tensor
        (`EvictingLayer`). `seen` is the true length, N or more. `bias`, per layer [R, H, S] float32
        next to the indices, is added to the attention logits of the kept tokens (`kvp.inclusion`).
        Raises ValueError on shapes that do not fit.
        """
        layers: list[StoredLayer] = []
        biases = [None] * len(indices) if bias is None else bias
        for layer_keys, layer_values, layer_indices, layer_bias in zip(
            keys, values, indices, biases, strict=True
        ):
            positions = torch.arange(layer_keys.shape[2], device=layer_keys.device)[None, None]
            layers.append(
                selected_layer(layer_keys, layer_values, positions, layer_indices, seen, layer_bias)
            )
        return cls(layers)

    def fork(self, n: int = 1) -> EvictingCache:
        """An independent cache that goes on from here; this one stays as it is.

        With `n` above 1 every entry of the batch is there `n` times in a row, for `n` continuations
        in one batch. Storage is shared until either cache is fed tokens, and `nbytes` counts it in
        both; only layers whose heads hold different numbers of tokens are copied at once for `n`
        above 1, and for `n=1` they share what was compressed for ever. Nothing records queries of
        the fork. Raises UsageError for `n` below 1.
        """
        if n < 1:
            raise UsageError(f"fork needs at least 1 row, got n={n}")
        fork = copy.copy(self)
        fork.layers = [layer.fork(n) for layer in self.layers]
        fork.recorder = None
        if n > 1 and fork.turn is not None:
            entries = range(len(fork.turn.budgets))
            fork.turn = fork.turn.taken([entry for entry in entries for _ in range(n)])
        return fork

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: object, **__: object
    ) -> tuple[StoredKeys, StoredKeys]:
        """Append [B, H, T, D] keys and values to layer `layer_idx` and hand the layer over."""
        while len(self.layers) <= layer_idx:
            self.layers.append(EvictingLayer())
        layer = self.layers[layer_idx]
        layer.update(key_states, value_states)
        stored = StoredKeys(layer, layer_idx, self.recorder)
        return stored, stored

    @property
    def nbytes(self) -> int:
        """Bytes of all key and value tensors, spare capacity included."""
        return sum(layer.nbytes for layer in self.layers)

    @property
    def entry_nbytes(self) -> list[int]:
        """Bytes of the key and value tensors of each batch entry, spare capacity included."""
        layers = zip(*(layer.entry_nbytes for layer in self.layers), strict=True)
        return [sum(entry) for entry in layers]

    def reset(self) -> None:
        """Forget everything: the cache is as empty as a new one."""
        self.layers.clear()
        self.turn = None

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Reorder the batch, for beam search."""
        super().reorder_cache(beam_idx)  # type: ignore[arg-type]
        self._take(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep only entries `indices` of the batch."""
        super().batch_select_indices(indices)
        self._take(indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every entry of the batch `repeats` times."""
        entries = torch.arange(self.layers[0].batch).repeat_interleave(repeats)
        super().batch_repeat_interleave(repeats)
        self._take(entries)

    def _take(self, entries: Tensor) -> None:
        """Entries of the batch, as indices or as a mask, in what is not kept by the layers."""
        if entries.dtype == torch.bool:
            entries = entries.nonzero()[:, 0]
        if self.recorder is not None:
            self.recorder.take(entries)
        if self.turn is not None:
            self.turn = self.turn.taken(entries.tolist())

    @property
    def lengths(self) -> list[int]:
        """True tokens that each batch entry has seen, without padding."""
        newest = self.layers[0]._newest
        assert newest is not None
        return (newest + 1).tolist()

    @property
    def evicted(self) -> bool:
        """True once any layer dropped or rearranged tokens."""
        return any(layer.evicted for layer in self.layers)
