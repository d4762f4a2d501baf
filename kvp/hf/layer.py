"""One layer of the evicting cache: stored slots, their true positions, and attention over them.

Every slot remembers the position of its token; slots that hold nothing (padding, or heads that keep
fewer tokens than the widest) carry the position `EMPTY`, which no query ever sees. The heads of a
layer share one dense tensor; a ragged layer would be a second class with the same methods. Left
out: rollback (`crop`), offloading, gradients.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import DynamicLayer
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from kvp.errors import ModelError, UsageError
from kvp.hf.attention import grouped_attention

EMPTY = torch.iinfo(torch.int64).max
"""Position of a slot that holds no token."""

GROWTH = 8
"""A full layer grows by 1/GROWTH of its slots, so that decoding does not copy it at every token."""


class EvictingLayer(DynamicLayer):  # type: ignore[no-untyped-call]
    """One layer: keys, values [B, H, S, D] and the position of every slot."""

    keys: Tensor
    values: Tensor

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen = 0
        """Tokens fed so far, padding columns included."""
        self.evicted = False
        """True once slots are no longer all columns seen, in order."""
        self._stored = 0
        self._gaps = False  # True once some slot may be EMPTY
        self._newest: Tensor | None = (
            None  # [B] newest position fed; the first layer alone keeps it
        )
        self._key_room: Tensor
        self._value_room: Tensor
        self._position_room: Tensor  # [B, H, capacity], or [B, 1, capacity] while heads agree

    @property
    def positions(self) -> Tensor:
        """[B, H, S] int64: true position of every slot's token, `EMPTY` where there is none."""
        positions = self._position_room[:, :, : self._stored]
        return positions.expand(-1, self._key_room.shape[1], -1)

    @property
    def nbytes(self) -> int:
        """Bytes of the key and value tensors held, room to grow included."""
        if not self.is_initialized:
            return 0
        return int(self._key_room.nbytes + self._value_room.nbytes)

    def get_seq_length(self) -> int:
        """Tokens seen."""
        return self.seen

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Slots after `query_length` more tokens, and the columns that are no longer stored."""
        return self._stored + query_length, self.seen - self._stored

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
        batch, _, tokens, _ = key_states.shape
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
            self._key_room = key_states.clone(memory_format=torch.contiguous_format)
            self._value_room = value_states.clone(memory_format=torch.contiguous_format)
            self._position_room = torch.full(
                (batch, 1, tokens), EMPTY, dtype=torch.int64, device=key_states.device
            )
        else:
            self._make_room(tokens)
            new = slice(self._stored, self._stored + tokens)
            self._key_room[:, :, new] = key_states
            self._value_room[:, :, new] = value_states
            self._position_room[:, :, new] = EMPTY
        self._stored += tokens
        self.seen += tokens
        self._show()
        return self.keys, self.values

    def _make_room(self, tokens: int) -> None:
        if self._stored + tokens <= self._key_room.shape[2]:
            return
        room = self._stored + max(tokens, self._stored // GROWTH)
        self._key_room = _grown(self._key_room, self._stored, room)
        self._value_room = _grown(self._value_room, self._stored, room)
        self._position_room = _grown(self._position_room, self._stored, room)

    def _show(self) -> None:
        self.keys = self._key_room[:, :, : self._stored]
        self.values = self._value_room[:, :, : self._stored]

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

        `options` carries the true positions, `position_ids` [B or 1, T], beside scaling and
        dropout; `mask` is a bool [B, 1, T, S] that shows padding among the new tokens. Raises
        ModelError when the model passes no positions, UsageError on a mask of another shape and on
        tokens the cache already holds.
        """
        position_ids = options.get("position_ids")
        if position_ids is None or position_ids.ndim != 2:
            raise ModelError(
                f"{type(module).__name__} passes no plain token positions to its attention: "
                "kvp cannot evict from this model"
            )
        tokens = query.shape[2]
        batch = query.shape[0]
        new_positions = position_ids.expand(batch, tokens)
        if mask is not None:
            if mask.dtype != torch.bool or mask.shape[-1] != self._stored:
                raise UsageError(
                    f"attention_mask must be 2-D, one column for each of {self.seen} tokens seen"
                )
            new_positions = new_positions.masked_fill(~mask[:, 0, -1, -tokens:], EMPTY)
            self._gaps = True
        if first:
            self._refuse_repeated_tokens(new_positions)
            self._refuse_rope_switch(module, new_positions)
        self._position_room[:, :, self._stored - tokens : self._stored] = new_positions[:, None]
        if not self.evicted:
            attended, _ = sdpa_attention_forward(
                module, query, self.keys, self.values, mask, **options
            )
            return attended
        visible = None  # one new token sees every slot, unless some are empty
        if tokens > 1 or self._gaps:
            slots = self._position_room[:, :, None, : self._stored]
            visible = slots <= position_ids[:, None, :, None]
        return grouped_attention(
            query,
            self.keys,
            self.values,
            visible,
            scaling=options.get("scaling"),
            dropout=options.get("dropout", 0.0),
        )

    def _refuse_repeated_tokens(self, new_positions: Tensor) -> None:
        if self._newest is not None and bool((new_positions <= self._newest[:, None]).any()):
            raise UsageError(
                "the tokens fed are already in past_key_values: leave at least one prompt token "
                f"out of the cache (it has seen {self.seen - new_positions.shape[1]}), and let an "
                "attention_mask cover all tokens"
            )
        newest = new_positions.masked_fill(new_positions == EMPTY, -1).amax(dim=1)
        self._newest = newest if self._newest is None else torch.maximum(newest, self._newest)

    def _refuse_rope_switch(self, module: nn.Module, new_positions: Tensor) -> None:
        rope = getattr(getattr(module, "config", None), "rope_parameters", None) or {}
        if rope.get("rope_type") != "longrope":
            return
        switch = rope["original_max_position_embeddings"]
        before = self.seen - new_positions.shape[1]
        if 0 < before <= switch and bool((new_positions[new_positions < EMPTY] >= switch).any()):
            raise UsageError(
                f"this model changes its RoPE after {switch} tokens, which would make the {before} "
                "cached keys wrong: shorten prompt and answer, or prefill past that length"
            )

    def select(self, indices: Tensor) -> EvictingLayer:
        """Keep slots `indices` [B, H, S] (-1 = none) in a new layer, in that order."""
        layer = selected_layer(self.keys, self.values, self.positions, indices, self.seen)
        layer._newest = self._newest
        return layer

    def _take_rows(self, rows: Tensor) -> None:
        if self.is_initialized:
            rows = rows.to(self._key_room.device)
            self._key_room = self._key_room[rows]
            self._value_room = self._value_room[rows]
            self._position_room = self._position_room[rows]
            self._newest = None if self._newest is None else self._newest[rows]
            self._show()

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Reorder the rows, as beam search asks."""
        self._take_rows(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep only rows `indices`."""
        self._take_rows(indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every row `repeats` times."""
        if self.is_initialized:
            rows = torch.arange(self._key_room.shape[0], device=self._key_room.device)
            self._take_rows(rows.repeat_interleave(repeats))

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


def _grown(room: Tensor, stored: int, capacity: int) -> Tensor:
    grown = room.new_empty(*room.shape[:2], capacity, *room.shape[3:])
    grown[:, :, :stored] = room[:, :, :stored]
    return grown


def selected_layer(
    keys: Tensor, values: Tensor, positions: Tensor, indices: Tensor, seen: int
) -> EvictingLayer:
    """Gather slots `indices` [R, H, S] (-1 = none) of keys and values [1 or R, H, N, D].

    `positions` [1 or R, 1 or H, N] int64 are the slots' positions, `seen` the true length. Raises
    ValueError on shapes that do not fit.
    """
    source_rows, heads, tokens, _ = keys.shape
    rows = indices.shape[0]
    if indices.ndim != 3 or indices.shape[1] != heads or source_rows not in (1, rows):
        raise ValueError(
            f"indices {tuple(indices.shape)} do not select from keys {tuple(keys.shape)}"
        )
    if seen < tokens:
        raise ValueError(f"{seen} tokens seen, but keys hold {tokens}")
    device = keys.device
    indices = indices.to(device)
    row = (
        torch.arange(rows, device=device)
        if source_rows == rows
        else torch.zeros_like(indices[:, 0, 0])
    )
    slot = (
        row[:, None, None],
        torch.arange(heads, device=device)[None, :, None],
        indices.clamp_min(0),
    )
    layer = EvictingLayer()
    layer.lazy_initialization(keys, values)
    layer._key_room, layer._value_room = keys[slot], values[slot]
    layer._position_room = positions.expand(source_rows, heads, tokens)[slot].masked_fill(
        indices < 0, EMPTY
    )
    layer.seen, layer.evicted = seen, True
    layer._gaps = bool((layer._position_room == EMPTY).any())
    layer._newest = torch.full((rows,), seen - 1, device=device)
    layer._stored = indices.shape[2]
    layer._show()
    return layer
