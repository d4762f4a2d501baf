"""A layer of the evicting cache whose heads store equally many tokens: dense tensors.

Every slot remembers the position of its token. Slots that hold nothing, which only padding leaves
behind, carry the position `EMPTY`, which no query ever sees.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from kvp.hf.attention import grouped_attention, is_eager, plain_attention
from kvp.hf.cache.base import EMPTY, StoredLayer, source_entries
from kvp.hf.cache.ragged import RaggedLayer, ragged_layer

GROWTH = 8
"""A full layer grows by 1/GROWTH of its slots, so that decoding does not copy it at every token."""


class EvictingLayer(StoredLayer):  # type: ignore[no-untyped-call]
    """One layer: keys, values [B, H, S, D] and the position of every slot."""

    def __init__(self) -> None:
        super().__init__()
        self._stored = 0
        self._key_storage: Tensor
        self._value_storage: Tensor
        self._position_storage: Tensor  # [B, H, capacity], or [B, 1, capacity] while heads agree

    @property
    def batch(self) -> int:
        """Entries of the batch, B."""
        return self._key_storage.shape[0]

    @property
    def positions(self) -> Tensor:
        """[B, H, S] int64: true position of every slot's token, `EMPTY` where there is none."""
        positions = self._position_storage[:, :, : self._stored]
        return positions.expand(-1, self._key_storage.shape[1], -1)

    @property
    def slots(self) -> tuple[Tensor, Tensor]:
        """Keys and values [B, H, S, D] of all slots."""
        return self.keys, self.values

    @property
    def entry_nbytes(self) -> list[int]:
        """Bytes of keys and values held for each batch entry, spare capacity included."""
        if not self.is_initialized:
            return []
        nbytes = self._key_storage.nbytes + self._value_storage.nbytes
        return [nbytes // self.batch] * self.batch if self.batch else []

    def _append(self, keys: Tensor, values: Tensor) -> None:
        batch, _, tokens, _ = keys.shape
        if not self.is_initialized:
            self.lazy_initialization(keys, values)
            self._key_storage = keys.clone(memory_format=torch.contiguous_format)
            self._value_storage = values.clone(memory_format=torch.contiguous_format)
            self._position_storage = torch.full(
                (batch, 1, tokens), EMPTY, dtype=torch.int64, device=keys.device
            )
        else:
            self._write(self._stored, keys, values, growth=self._stored // GROWTH)
        self._stored += tokens
        self._show()

    def _show(self) -> None:
        self.keys = self._key_storage[:, :, : self._stored]
        self.values = self._value_storage[:, :, : self._stored]

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
        self._position_storage[:, :, self._stored - tokens : self._stored] = new_positions[:, None]
        if not self.evicted:
            return plain_attention(module, query, self.keys, self.values, mask, **options)
        visible = None  # one new token sees every slot, unless some are empty
        if tokens > 1 or self._gaps:
            slots = self._position_storage[:, :, None, : self._stored]  # [B, H or 1, 1, S]
            visible = slots <= options["position_ids"][:, None, :, None]  # [B, H or 1, T, S]
        return grouped_attention(
            query,
            self.keys,
            self.values,
            visible,
            scaling=options.get("scaling"),
            dropout=options.get("dropout", 0.0),
            eager=is_eager(module),
            softcap=options.get("softcap"),
            sinks=options.get("s_aux"),
        )

    def select(self, indices: Tensor) -> EvictingLayer | RaggedLayer:
        """Keep slots `indices` [B, H, S] (-1 = none) in a new layer, in that order."""
        layer = selected_layer(self.keys, self.values, self.positions, indices, self.seen)
        layer._newest = self._newest
        return layer

    def _tensors(self) -> dict[str, Tensor]:
        positions = self._position_storage[:, :, : self._stored]
        return {"keys": self.keys, "values": self.values, "positions": positions}

    def _take_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        self._key_storage, self._value_storage = tensors["keys"], tensors["values"]
        self.lazy_initialization(self._key_storage, self._value_storage)
        self._position_storage = tensors["positions"]
        self._stored = self._key_storage.shape[2]
        self._show()

    def _take_entries(self, entries: Tensor) -> None:
        # Of one entry all are views, copied when they are written.
        self._shared = self.batch == 1

        def take(stored: Tensor) -> Tensor:
            one = stored.shape[0] == 1
            return stored.expand(len(entries), *stored.shape[1:]) if one else stored[entries]

        self._key_storage = take(self._key_storage)
        self._value_storage = take(self._value_storage)
        self._position_storage = take(self._position_storage)
        self._show()


def selected_layer(
    keys: Tensor,
    values: Tensor,
    positions: Tensor,
    indices: Tensor,
    seen: int,
) -> EvictingLayer | RaggedLayer:
    """Gather slots `indices` [R, H, S] (-1 = none) of keys and values [1 or R, H, N, D].

    `positions` [1 or R, 1 or H, N] int64 are the slots' positions, `seen` the true length. The
    layer is ragged as soon as one head has no token in one of the S slots. Raises ValueError on
    shapes that do not fit.
    """
    batch, heads, tokens, _ = keys.shape
    indices = indices.to(keys.device)
    entry = source_entries(keys, indices)
    if seen < tokens:
        raise ValueError(f"{seen} tokens seen, but keys hold {tokens}")
    slot = (  # indexes [R, H, S] of [batch, heads, tokens]
        entry[:, None, None],
        torch.arange(heads, device=keys.device)[None, :, None],
        indices.clamp_min(0),
    )
    kept = positions.expand(batch, heads, tokens)[slot].masked_fill(indices < 0, EMPTY)  # [R, H, S]
    layer: EvictingLayer | RaggedLayer
    if bool((kept == EMPTY).any()):
        layer = ragged_layer(keys, values, kept, slot)
    else:
        layer = EvictingLayer()
        layer.lazy_initialization(keys, values)
        layer._key_storage, layer._value_storage = keys[slot], values[slot]
        layer._position_storage, layer._stored = kept, indices.shape[2]
        layer._show()
    layer.seen, layer.evicted = seen, True
    layer._newest = torch.full((indices.shape[0],), seen - 1, device=keys.device)
    return layer
