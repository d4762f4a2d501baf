"""A layer of the evicting cache whose heads store equally many tokens: one dense tensor.

Every slot remembers the position of its token. Slots that hold nothing, which only padding leaves
behind, carry the position `EMPTY`, which no query ever sees.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from kvp.hf.attention import grouped_attention
from kvp.hf.cache.base import EMPTY, StoredLayer, grown, source_rows
from kvp.hf.cache.ragged import RaggedLayer, ragged_layer

GROWTH = 8
"""A full layer grows by 1/GROWTH of its slots, so that decoding does not copy it at every token."""


class EvictingLayer(StoredLayer):  # type: ignore[no-untyped-call]
    """One layer: keys, values [B, H, S, D] and the position of every slot."""

    def __init__(self) -> None:
        super().__init__()
        self._stored = 0
        self._gaps = False  # True once some slot may be EMPTY
        self._key_room: Tensor
        self._value_room: Tensor
        self._position_room: Tensor  # [B, H, capacity], or [B, 1, capacity] while heads agree

    @property
    def rows(self) -> int:
        """Rows of the batch, B."""
        return self._key_room.shape[0]

    @property
    def positions(self) -> Tensor:
        """[B, H, S] int64: true position of every slot's token, `EMPTY` where there is none."""
        positions = self._position_room[:, :, : self._stored]
        return positions.expand(-1, self._key_room.shape[1], -1)

    @property
    def row_nbytes(self) -> list[int]:
        """Bytes of the key and value tensors held for each row, room to grow included."""
        if not self.is_initialized:
            return []
        held = self._key_room.nbytes + self._value_room.nbytes
        return [held // self.rows] * self.rows if self.rows else []

    def _append(self, keys: Tensor, values: Tensor) -> None:
        batch, _, tokens, _ = keys.shape
        if not self.is_initialized:
            self.lazy_initialization(keys, values)
            self._key_room = keys.clone(memory_format=torch.contiguous_format)
            self._value_room = values.clone(memory_format=torch.contiguous_format)
            self._position_room = torch.full(
                (batch, 1, tokens), EMPTY, dtype=torch.int64, device=keys.device
            )
        else:
            self._make_room(tokens)
            new = slice(self._stored, self._stored + tokens)
            self._key_room[:, :, new] = keys
            self._value_room[:, :, new] = values
            self._position_room[:, :, new] = EMPTY
        self._stored += tokens
        self._show()

    def _make_room(self, tokens: int) -> None:
        if self._stored + tokens <= self._key_room.shape[2]:
            return
        room = self._stored + max(tokens, self._stored // GROWTH)
        self._key_room = grown(self._key_room, self._stored, room)
        self._value_room = grown(self._value_room, self._stored, room)
        self._position_room = grown(self._position_room, self._stored, room)

    def _show(self) -> None:
        self.keys = self._key_room[:, :, : self._stored]
        self.values = self._value_room[:, :, : self._stored]

    def _attend(
        self,
        module: nn.Module,
        query: Tensor,
        mask: Tensor | None,
        options: Mapping[str, Any],
        new_positions: Tensor,
    ) -> Tensor:
        tokens = query.shape[2]
        self._gaps |= mask is not None
        self._position_room[:, :, self._stored - tokens : self._stored] = new_positions[:, None]
        if not self.evicted:
            attended, _ = sdpa_attention_forward(
                module, query, self.keys, self.values, mask, **options
            )
            return attended
        visible = None  # one new token sees every slot, unless some are empty
        if tokens > 1 or self._gaps:
            slots = self._position_room[:, :, None, : self._stored]
            visible = slots <= options["position_ids"][:, None, :, None]
        return grouped_attention(
            query,
            self.keys,
            self.values,
            visible,
            scaling=options.get("scaling"),
            dropout=options.get("dropout", 0.0),
        )

    def select(self, indices: Tensor) -> EvictingLayer | RaggedLayer:
        """Keep slots `indices` [B, H, S] (-1 = none) in a new layer, in that order."""
        layer = selected_layer(self.keys, self.values, self.positions, indices, self.seen)
        layer._newest = self._newest
        return layer

    def _take_rows(self, rows: Tensor) -> None:
        self._key_room = self._key_room[rows]
        self._value_room = self._value_room[rows]
        self._position_room = self._position_room[rows]
        self._show()


def selected_layer(
    keys: Tensor, values: Tensor, positions: Tensor, indices: Tensor, seen: int
) -> EvictingLayer | RaggedLayer:
    """Gather slots `indices` [R, H, S] (-1 = none) of keys and values [1 or R, H, N, D].

    `positions` [1 or R, 1 or H, N] int64 are the slots' positions, `seen` the true length. The
    layer is ragged as soon as one head has no token in one of the S places. Raises ValueError on
    shapes that do not fit.
    """
    held, heads, tokens, _ = keys.shape
    indices = indices.to(keys.device)
    row = source_rows(keys, indices)
    if seen < tokens:
        raise ValueError(f"{seen} tokens seen, but keys hold {tokens}")
    slot = (
        row[:, None, None],
        torch.arange(heads, device=keys.device)[None, :, None],
        indices.clamp_min(0),
    )
    chosen = positions.expand(held, heads, tokens)[slot].masked_fill(indices < 0, EMPTY)
    layer: EvictingLayer | RaggedLayer
    if bool((chosen == EMPTY).any()):
        layer = ragged_layer(keys, values, chosen, slot)
    else:
        layer = EvictingLayer()
        layer.lazy_initialization(keys, values)
        layer._key_room, layer._value_room = keys[slot], values[slot]
        layer._position_room, layer._stored = chosen, indices.shape[2]
        layer._show()
    layer.seen, layer.evicted = seen, True
    layer._newest = torch.full((indices.shape[0],), seen - 1, device=keys.device)
    return layer
