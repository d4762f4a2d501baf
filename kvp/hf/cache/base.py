"""Base class of the evicting cache's layers, whichever way they store tokens.

A layer counts the tokens it has seen, refuses operations that would silently go wrong, and hands
the true positions of new tokens to its attention. Tokens are stored by `kvp.hf.cache.dense`
(equally many per head) and `kvp.hf.cache.ragged` (each head another number). Left out: rollback
(`crop`), offloading, gradients.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor, nn
from transformers.cache_utils import DynamicLayer

from kvp.errors import ModelError, UsageError
from kvp.hf.layer_kinds import evicted_layers
from kvp.hf.limits import attention_window, rope_switch

EMPTY = torch.iinfo(torch.int64).max
"""Position of a slot that holds no token."""


@dataclass(frozen=True, kw_only=True)
class LayerState:
    """All that a layer is; `docs/formats.md` describes its tensors."""

    tensors: Mapping[str, Tensor]
    """Keys, values, positions and so on, by name."""
    seen: int
    """Tokens fed, padding columns included."""
    evicted: bool
    """True once slots are no longer all columns seen, in order."""
    gaps: bool
    """True once some slot may hold no token."""


class StoredLayer(DynamicLayer, ABC):
    """One layer of an `EvictingCache`."""

    keys: Tensor
    values: Tensor
    _key_storage: Tensor
    _value_storage: Tensor
    _position_storage: Tensor

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen = 0
        """Tokens fed so far, padding columns included."""
        self.evicted = False
        """True once slots are no longer all columns seen, in order."""
        self._gaps = False  # True once some slot may be EMPTY
        self._newest: Tensor | None = (
            None  # [B] newest position fed; the first layer alone keeps it
        )
        self._shared = False  # True while other layers may read the storage, as after a fork

    @property
    @abstractmethod
    def batch(self) -> int:
        """Entries of the batch, B."""

    @property
    @abstractmethod
    def positions(self) -> Tensor:
        """[B, H, S] int64: true position of every slot's token, `EMPTY` where there is none."""

    @property
    @abstractmethod
    def slots(self) -> tuple[Tensor, Tensor]:
        """Keys and values [B, H, S, D] of all slots, as `positions` lists them.

        Slots without a token hold zeros.
        """

    @property
    @abstractmethod
    def entry_nbytes(self) -> list[int]:
        """Bytes of keys and values held for each batch entry, spare capacity included."""

    @abstractmethod
    def select(self, indices: Tensor) -> StoredLayer:
        """Keep slots `indices` [B, H, S] (-1 = none) in a new layer, in that order."""

    @abstractmethod
    def _tensors(self) -> dict[str, Tensor]:
        """All that is stored, by the names of docs/formats.md, without spare capacity."""

    @abstractmethod
    def _take_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        """Become what `_tensors` returned."""

    @abstractmethod
    def _append(self, keys: Tensor, values: Tensor) -> None:
        """Store [B, H, T, D] keys and values; `_attend` brings their positions."""

    def _write(self, stored: int, keys: Tensor, values: Tensor, *, growth: int) -> None:
        """Write [B, H, T, D] keys and values after the first `stored` slots of the storage.

        Storage without capacity for them grows by `growth` slots, or by T if that is more; shared
        storage is left to the others.
        """
        tokens = keys.shape[2]
        if self._shared or stored + tokens > self._key_storage.shape[2]:
            capacity = stored + max(tokens, growth)
            self._key_storage = grown(self._key_storage, stored, capacity)
            self._value_storage = grown(self._value_storage, stored, capacity)
            self._position_storage = grown(self._position_storage, stored, capacity)
            self._position_storage[:, :, stored:] = EMPTY  # until `_attend` brings them
            self._shared = False
        self._key_storage = writable(self._key_storage)
        self._value_storage = writable(self._value_storage)
        self._position_storage = writable(self._position_storage)
        self._key_storage[:, :, stored : stored + tokens] = keys
        self._value_storage[:, :, stored : stored + tokens] = values

    @abstractmethod
    def _attend(
        self,
        module: nn.Module,
        query: Tensor,
        mask: Tensor | None,
        options: Mapping[str, Any],
        new_positions: Tensor,
    ) -> Tensor:
        """As `attend`, with the positions [B, T] of the new tokens, `EMPTY` for padding."""

    @abstractmethod
    def _take_entries(self, entries: Tensor) -> None:
        """Make entries `entries` [R] int64 the batch."""

    @property
    def nbytes(self) -> int:
        """Bytes of the key and value tensors held, spare capacity included."""
        return sum(self.entry_nbytes)

    def fork(self, n: int) -> Self:
        """A layer that goes on from here, every entry `n` times in a row.

        It reads the same storage until one of the two is fed tokens, and copies then.
        """
        fork = copy.copy(self)
        self._shared = fork._shared = True
        if n > 1:
            fork.batch_repeat_interleave(n)
        return fork

    @property
    def state(self) -> LayerState:
        """All that the layer is; shares its memory."""
        newest = {} if self._newest is None else {"newest": self._newest}
        return LayerState(
            tensors={**self._tensors(), **newest},
            seen=self.seen,
            evicted=self.evicted,
            gaps=self._gaps,
        )

    @classmethod
    def of_state(cls, state: LayerState) -> Self:
        """The layer that had this state; keeps its tensors and writes to them."""
        layer = cls()
        layer._take_tensors(state.tensors)
        layer._newest = state.tensors.get("newest")
        layer.seen, layer.evicted, layer._gaps = state.seen, state.evicted, state.gaps
        return layer

    def get_seq_length(self) -> int:
        """Tokens seen."""
        return self.seen

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Columns of the mask for `query_length` more tokens, and the first of them.

        After eviction the mask covers the new tokens alone: of the stored ones, the layer knows.
        """
        return (query_length, self.seen) if self.evicted else (self.seen + query_length, 0)

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Append [B, H, T, D] keys and values; their positions follow when they are attended.

        Raises UsageError when gradients would have to flow through the cache.
        """
        if torch.is_grad_enabled() and key_states.requires_grad:
            raise UsageError(
                "an EvictingCache holds no gradients: call the model in torch.no_grad()"
            )
        self._append(key_states, value_states)
        self.seen += key_states.shape[2]
        return self.keys, self.values

    def attend(
        self,
        module: nn.Module,
        query: Tensor,
        mask: Tensor | None,
        options: Mapping[str, Any],
        *,
        first: bool,
    ) -> Tensor:
        """Attention of the newest tokens over the stored slots: [B, Q, T, D] -> [B, T, Q, D].

        `options` carries the true positions, `position_ids` [B or 1, T], next to scaling and
        dropout; `mask` is a bool [B, 1, T, S] that shows padding among the new tokens, S as
        in `get_mask_sizes`. Raises ModelError when the model passes no positions, UsageError on a
        mask of another shape and on tokens the cache already holds.
        """
        if options.get("position_bias") is not None:
            raise ModelError(f"{type(module).__name__} adds a position bias, which kvp cannot keep")
        tokens = query.shape[2]
        position_ids = options.get("position_ids")
        if position_ids is None:  # Llama 4: columns, padding included, order tokens as well
            columns = torch.arange(self.seen - tokens, self.seen, device=query.device)
            options = {**options, "position_ids": columns[None]}
            position_ids = options["position_ids"]
        elif position_ids.ndim != 2:
            raise ModelError(
                f"{type(module).__name__} passes no plain token positions to its attention, "
                "which eviction needs"
            )
        new_positions = position_ids.expand(query.shape[0], tokens)
        if mask is not None:
            if mask.dtype != torch.bool or mask.shape[-1] != (
                tokens if self.evicted else self.seen
            ):
                raise UsageError(
                    f"attention_mask must be 2-D, one column for each of {self.seen} tokens seen"
                )
            new_positions = new_positions.masked_fill(~mask[:, 0, -1, -tokens:], EMPTY)
        if first:
            self._refuse_repeated_tokens(new_positions)
            self._refuse_other_attention(module, new_positions)
        return self._attend(module, query, mask, options, new_positions)

    def _refuse_repeated_tokens(self, new_positions: Tensor) -> None:
        if self._newest is not None and bool((new_positions <= self._newest[:, None]).any()):
            raise UsageError(
                "the tokens fed are already in past_key_values: leave at least one prompt token "
                f"out of the cache (it has seen {self.seen - new_positions.shape[1]}), and let an "
                "attention_mask cover all tokens"
            )
        newest = new_positions.masked_fill(new_positions == EMPTY, -1).amax(dim=1)
        self._newest = newest if self._newest is None else torch.maximum(newest, self._newest)

    def _refuse_other_attention(self, module: nn.Module, new_positions: Tensor) -> None:
        """Raise UsageError where the model's attention is not the one the cached keys were for."""
        config = getattr(module, "config", None)
        before = self.seen - new_positions.shape[1]
        index = getattr(module, "layer_idx", 0)
        if before == 0 and config is not None and index != evicted_layers(config)[0]:
            raise UsageError(
                "this model has layers that nothing is evicted from: make its cache by "
                "EvictingCache.of(model.config)"
            )
        switch, window = rope_switch(config), attention_window(config)
        if switch is None and window is None:
            return
        newest = int(new_positions.masked_fill(new_positions == EMPTY, -1).max())
        if switch is not None and 0 < before <= switch <= newest:
            raise UsageError(
                f"this model changes its RoPE after {switch} tokens, which would make the {before} "
                "cached keys wrong: shorten prompt and answer, or prefill past that length"
            )
        if window is not None and newest >= window:
            raise UsageError(
                f"this model attends through a sliding window of {window} tokens, and the prompt "
                "and its answer are longer: shorten them or choose a model with full attention"
            )

    def _change_batch(self, entries: Tensor) -> None:
        if self.is_initialized:
            every = torch.arange(self.batch, device=self.keys.device)
            entries = every[entries.to(self.keys.device)]  # a bool mask becomes indices
            self._take_entries(entries)
            self._newest = None if self._newest is None else self._newest[entries]

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Reorder the batch, for beam search."""
        self._change_batch(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep only entries `indices` of the batch."""
        self._change_batch(indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every entry of the batch `repeats` times."""
        if self.is_initialized:
            self._change_batch(torch.arange(self.batch).repeat_interleave(repeats))

    def reset(self) -> None:
        """Forget everything."""
        self.__init__()  # type: ignore[misc]

    def crop(self, tokens_to_remove: int) -> None:
        """Refused: what was evicted cannot come back. Raises UsageError unless 0 tokens go."""
        if tokens_to_remove != 0:
            raise UsageError(
                "an EvictingCache cannot be rolled back: assisted and speculative decoding, and "
                "crop(), need a DynamicCache"
            )


def grown(storage: Tensor, stored: int, capacity: int) -> Tensor:
    """The first `stored` slots of `storage` [B, H, S, ...] in a tensor of `capacity` slots."""
    larger = storage.new_empty(*storage.shape[:2], capacity, *storage.shape[3:])
    larger[:, :, :stored] = storage[:, :, :stored]
    return larger


def writable(tensor: Tensor) -> Tensor:
    """`tensor`, or a copy where it was made in `torch.inference_mode` and is now used outside."""
    return (
        tensor.clone()
        if tensor.is_inference() and not torch.is_inference_mode_enabled()
        else tensor
    )


def source_entries(keys: Tensor, indices: Tensor) -> Tensor:
    """The batch entry of keys [1 or R, H, N, D] that serves each of `indices` [R, H, S]: [R] int64.

    Raises ValueError on shapes that do not fit.
    """
    batch, heads = keys.shape[:2]
    if indices.ndim != 3 or indices.shape[1] != heads or batch not in (1, indices.shape[0]):
        raise ValueError(
            f"indices {tuple(indices.shape)} do not select from keys {tuple(keys.shape)}"
        )
    entries = torch.arange(indices.shape[0], device=keys.device)
    return entries if batch > 1 else torch.zeros_like(entries)
