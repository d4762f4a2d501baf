"""A layer of the evicting cache whose heads store different numbers of tokens.

Tokens kept by an eviction lie flat, head after head, with a length per head; absent tokens take no
memory. Tokens fed afterwards are as many in every head and lie in a dense tail that grows. Why so:
`docs/decisions.md#ragged-heads`.

Bytes of keys and values are those of the tokens stored plus at most `TAIL_GROWTH` - 1 empty slots
per batch entry and head, once tokens have been fed. Positions add 4 bytes per token kept and 8
bytes per batch entry and tail slot.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from kvp.errors import UsageError
from kvp.hf.cache.base import EMPTY, StoredLayer
from kvp.ops.ragged_attention import RaggedLayout, ragged_attention

TAIL_GROWTH = 32
"""A full tail grows by this many slots, so that decoding does not copy it at every token."""


class RaggedLayer(StoredLayer):  # type: ignore[no-untyped-call]
    """One layer: flat keys, values [M, D] with lengths [B, H], and a tail [B, H, T, D].

    `keys` and `values` are the flat part: entry after entry, head after head, token after token.
    """

    def __init__(self) -> None:
        super().__init__()
        self.evicted = True
        self._layout: RaggedLayout
        self._flat_positions: Tensor  # [M] int32
        self._tail = 0
        self._key_storage: Tensor  # [B, H, capacity, D]
        self._value_storage: Tensor
        self._position_storage: Tensor  # [B, 1, capacity] int64

    @property
    def lengths(self) -> Tensor:
        """[B, H] int64, tokens of each head in the flat part."""
        return self._layout.lengths

    @property
    def batch(self) -> int:
        """Entries of the batch, B."""
        return self.lengths.shape[0]

    @property
    def tail_keys(self) -> Tensor:
        """[B, H, T, D] keys of the tokens fed since the eviction."""
        return self._key_storage[:, :, : self._tail]

    @property
    def tail_values(self) -> Tensor:
        """[B, H, T, D] values of the tokens fed since the eviction."""
        return self._value_storage[:, :, : self._tail]

    @property
    def positions(self) -> Tensor:
        """[B, H, S] int64: true position of every slot's token, `EMPTY` where there is none.

        Slots are those of the longest flat head, then the tail.
        """
        present = self._present()  # [B, H, longest]
        flat = torch.full(present.shape, EMPTY, device=present.device)
        flat[present] = self._flat_positions.long()
        tail = self._position_storage[:, :, : self._tail].expand(-1, present.shape[1], -1)
        return torch.cat([flat, tail], dim=-1)

    @property
    def slots(self) -> tuple[Tensor, Tensor]:
        """Keys and values [B, H, S, D] of all slots, zeros where none is."""
        present = self._present()
        keys = torch.cat([self._padded(self.keys, present), self.tail_keys], dim=2)
        values = torch.cat([self._padded(self.values, present), self.tail_values], dim=2)
        return keys, values

    @staticmethod
    def _padded(flat: Tensor, present: Tensor) -> Tensor:
        """Tokens [M, D] of the flat part at their slots: [B, H, longest, D]."""
        padded = flat.new_zeros(*present.shape, flat.shape[1])
        padded[present] = flat
        return padded

    @property
    def entry_nbytes(self) -> list[int]:
        """Bytes of keys and values held for each batch entry, spare capacity included."""
        if not self.is_initialized:
            return []
        token = (self.keys.shape[1] + self.values.shape[1]) * self.keys.element_size()
        tail = self._key_storage.shape[1] * self._key_storage.shape[2]
        counts: list[int] = self.lengths.sum(dim=1).tolist()
        return [(count + tail) * token for count in counts]

    def _present(self) -> Tensor:
        """[B, H, longest] bool: which slots of the padded flat part hold a token."""
        longest = int(self.lengths.max()) if self.lengths.numel() else 0
        return torch.arange(longest, device=self.lengths.device) < self.lengths[..., None]

    def _append(self, keys: Tensor, values: Tensor) -> None:
        batch, heads, tokens, _ = keys.shape
        if not self.is_initialized:
            empty = torch.empty(batch, heads, 0, dtype=torch.int64, device=keys.device)
            none = keys.new_empty(0, keys.shape[3]), values.new_empty(0, values.shape[3])
            self._fill(*none, empty)
        self._write(self._tail, keys, values, growth=TAIL_GROWTH)
        self._tail += tokens

    def _attend(
        self,
        module: nn.Module,
        query: Tensor,
        mask: Tensor | None,
        options: Mapping[str, Any],
        new_positions: Tensor,
    ) -> Tensor:
        if options.get("dropout", 0.0):
            raise UsageError("heads of different lengths have no dropout: call model.eval() first")
        tokens = query.shape[2]
        self._gaps |= mask is not None
        self._position_storage[:, 0, self._tail - tokens : self._tail] = new_positions
        visible = None  # one new token sees the whole tail, unless padding is among it
        if tokens > 1 or self._gaps:
            slots = self._position_storage[:, :, : self._tail]  # [B, 1, tail]
            visible = slots <= options["position_ids"][..., None]  # [B or 1, T, tail]
            visible = visible.expand(query.shape[0], -1, -1)
        attended = ragged_attention(
            query,
            self.keys,
            self.values,
            self._layout,
            self.tail_keys,
            self.tail_values,
            visible,
            scaling=options.get("scaling"),
            softcap=options.get("softcap"),
            sinks=options.get("s_aux"),
        )
        return attended.transpose(1, 2).contiguous()

    def select(self, indices: Tensor) -> RaggedLayer:
        """Keep slots `indices` [B, H, S] (-1 = none) of `positions` in a new layer, in that order.

        Raises ValueError on shapes that do not fit.
        """
        longest = self._present().shape[2]
        if indices.ndim != 3 or indices.shape[:2] != self.lengths.shape:
            raise ValueError(
                f"indices {tuple(indices.shape)} do not select from lengths "
                f"{tuple(self.lengths.shape)}"
            )
        indices = indices.to(self.lengths.device)
        slots = indices.clamp_min(0)  # [B, H, S], as the three below
        positions = self.positions.gather(2, slots).masked_fill(indices < 0, EMPTY)
        in_tail = slots - longest
        present = positions < EMPTY
        flat, tail = (present & (in_tail < 0)), (present & (in_tail >= 0))
        ends = self.lengths.flatten().cumsum(0).view_as(self.lengths)
        start = (ends - self.lengths)[..., None]  # [B, H, 1], where a head's flat part begins
        entry, head, _ = tail.nonzero(as_tuple=True)
        layer = RaggedLayer()
        keys, values = (
            _merged(
                stored, (start + slots)[flat], storage[entry, head, in_tail[tail]], flat, present
            )
            for stored, storage in (
                (self.keys, self._key_storage),
                (self.values, self._value_storage),
            )
        )
        layer._fill(keys, values, positions)
        layer.seen, layer._newest = self.seen, self._newest
        return layer

    def _tensors(self) -> dict[str, Tensor]:
        return {
            "keys": self.keys,
            "values": self.values,
            "positions": self._flat_positions,
            "lengths": self.lengths,
            "tail_keys": self.tail_keys,
            "tail_values": self.tail_values,
            "tail_positions": self._position_storage[:, :, : self._tail],
        }

    def _take_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        self.lazy_initialization(tensors["keys"], tensors["values"])
        self.keys, self.values = tensors["keys"], tensors["values"]
        self._flat_positions = tensors["positions"]
        self._layout = RaggedLayout(tensors["lengths"])
        self._key_storage, self._value_storage = tensors["tail_keys"], tensors["tail_values"]
        self._position_storage = tensors["tail_positions"]
        self._tail = self._key_storage.shape[2]

    def _take_entries(self, entries: Tensor) -> None:
        spans = self.lengths.sum(dim=1).tolist()  # tokens of each entry, one stretch of memory
        taken = entries.tolist()

        def take(flat: Tensor) -> Tensor:
            parts = flat.split(spans)  # type: ignore[no-untyped-call]
            return torch.cat([parts[entry] for entry in taken]) if taken else flat[:0]

        self._shared = False
        self.keys, self.values = take(self.keys), take(self.values)
        self._flat_positions = take(self._flat_positions)
        self._layout = RaggedLayout(self.lengths[entries])
        self._key_storage, self._value_storage = (
            self._key_storage[entries],
            self._value_storage[entries],
        )
        self._position_storage = self._position_storage[entries]

    def _fill(self, keys: Tensor, values: Tensor, positions: Tensor) -> None:
        """Become keys and values [M, D], one for each of `positions` [B, H, S] not `EMPTY`."""
        present = positions < EMPTY
        self.lazy_initialization(keys, values)
        self.keys, self.values = keys, values
        self._layout = RaggedLayout(present.sum(dim=-1))
        self._flat_positions = positions[present].int()
        batch, heads, _ = positions.shape
        self._key_storage = keys.new_empty(batch, heads, 0, keys.shape[1])
        self._value_storage = values.new_empty(batch, heads, 0, values.shape[1])
        self._position_storage = positions.new_empty(batch, 1, 0)


def ragged_layer(
    keys: Tensor,
    values: Tensor,
    positions: Tensor,
    slots: tuple[Tensor, Tensor, Tensor],
) -> RaggedLayer:
    """The tokens of keys and values [R, H, N, D] that have a position.

    `slots` are batch entry, head and token of each, together of shape [B, H, S]; `positions`
    [B, H, S] int64 is `EMPTY` where there is no token.
    """
    present = positions < EMPTY
    taken = tuple(part.expand(positions.shape)[present] for part in slots)
    layer = RaggedLayer()
    layer._fill(keys[taken], values[taken], positions)
    return layer


def _merged(
    stored: Tensor, index: Tensor, others: Tensor, from_stored: Tensor, present: Tensor
) -> Tensor:
    """Tokens [M, D] of all `present` slots: those `from_stored` at `index`, then `others`."""
    merged = stored.new_empty(int(present.sum()), stored.shape[1])
    is_stored = from_stored[present]  # [M]
    merged[is_stored] = stored[index]
    merged[~is_stored] = others
    return merged
