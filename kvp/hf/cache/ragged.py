"""A layer of the evicting cache whose heads store different numbers of tokens.

Tokens kept by an eviction lie flat, head after head, with a length per head; absent tokens take no
memory. Tokens fed afterwards are as many in every head and lie in a dense tail that grows. Why so:
`docs/decisions/0024-ragged-heads-lie-flat.md`.

Bytes of keys and values are those of the tokens stored plus room for at most `TAIL_ROOM` - 1 tokens
per row and head, once tokens have been fed. Beside them stand a position of 4 bytes per token kept
and of 8 bytes per row and tail slot.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from kvp.errors import UsageError
from kvp.hf.cache.base import EMPTY, StoredLayer, grown
from kvp.ops.ragged_attention import ragged_attention

TAIL_ROOM = 32
"""A full tail grows by this many slots, so that decoding does not copy it at every token."""


class RaggedLayer(StoredLayer):  # type: ignore[no-untyped-call]
    """One layer: flat keys, values [M, D] with lengths [B, H], and a tail [B, H, T, D].

    `keys` and `values` are the flat part: row after row, head after head, token after token.
    """

    def __init__(self) -> None:
        super().__init__()
        self.evicted = True
        self.lengths: Tensor
        """[B, H] int64, tokens of each head in the flat part."""
        self._flat_positions: Tensor  # [M] int32
        self._tail = 0
        self._gaps = False  # True once some tail slot may be EMPTY
        self._key_room: Tensor  # [B, H, capacity, D]
        self._value_room: Tensor
        self._position_room: Tensor  # [B, 1, capacity] int64

    @property
    def rows(self) -> int:
        """Rows of the batch, B."""
        return self.lengths.shape[0]

    @property
    def tail_keys(self) -> Tensor:
        """[B, H, T, D] keys of the tokens fed since the eviction."""
        return self._key_room[:, :, : self._tail]

    @property
    def tail_values(self) -> Tensor:
        """[B, H, T, D] values of the tokens fed since the eviction."""
        return self._value_room[:, :, : self._tail]

    @property
    def positions(self) -> Tensor:
        """[B, H, S] int64: true position of every slot's token, `EMPTY` where there is none.

        Slots are those of the longest flat head, then the tail.
        """
        held = self._held()
        flat = torch.full(held.shape, EMPTY, device=held.device)
        flat[held] = self._flat_positions.long()
        tail = self._position_room[:, :, : self._tail].expand(-1, held.shape[1], -1)
        return torch.cat([flat, tail], dim=-1)

    @property
    def row_nbytes(self) -> list[int]:
        """Bytes of the key and value tensors held for each row, room to grow included."""
        if not self.is_initialized:
            return []
        token = (self.keys.shape[1] + self.values.shape[1]) * self.keys.element_size()
        room = self._key_room.shape[1] * self._key_room.shape[2]
        counts: list[int] = self.lengths.sum(dim=1).tolist()
        return [(count + room) * token for count in counts]

    def _held(self) -> Tensor:
        """[B, H, longest] bool: which slots of the padded flat part hold a token."""
        longest = int(self.lengths.max()) if self.lengths.numel() else 0
        return torch.arange(longest, device=self.lengths.device) < self.lengths[..., None]

    def _append(self, keys: Tensor, values: Tensor) -> None:
        batch, heads, tokens, _ = keys.shape
        if not self.is_initialized:
            empty = torch.empty(batch, heads, 0, dtype=torch.int64, device=keys.device)
            none = keys.new_empty(0, keys.shape[3]), values.new_empty(0, values.shape[3])
            self._fill(*none, empty)
        if self._tail + tokens > self._key_room.shape[2]:
            room = self._tail + max(tokens, TAIL_ROOM)
            self._key_room = grown(self._key_room, self._tail, room)
            self._value_room = grown(self._value_room, self._tail, room)
            self._position_room = grown(self._position_room, self._tail, room)
        new = slice(self._tail, self._tail + tokens)
        self._key_room[:, :, new] = keys
        self._value_room[:, :, new] = values
        self._position_room[:, :, new] = EMPTY
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
        self._position_room[:, 0, self._tail - tokens : self._tail] = new_positions
        visible = None  # one new token sees the whole tail, unless padding is among it
        if tokens > 1 or self._gaps:
            slots = self._position_room[:, :, : self._tail]
            visible = slots <= options["position_ids"][..., None]
            visible = visible.expand(query.shape[0], -1, -1)
        attended = ragged_attention(
            query,
            self.keys,
            self.values,
            self.lengths,
            self.tail_keys,
            self.tail_values,
            visible,
            scaling=options.get("scaling"),
        )
        return attended.transpose(1, 2).contiguous()

    def select(self, indices: Tensor) -> RaggedLayer:
        """Keep slots `indices` [B, H, S] (-1 = none) of `positions` in a new layer, in that order.

        Raises ValueError on shapes that do not fit.
        """
        held = self._held()
        if indices.ndim != 3 or indices.shape[:2] != held.shape[:2]:
            raise ValueError(
                f"indices {tuple(indices.shape)} do not select from lengths {tuple(held.shape[:2])}"
            )
        indices = indices.to(held.device)
        places = indices.clamp_min(0)
        chosen = self.positions.gather(2, places).masked_fill(indices < 0, EMPTY)
        ends = self.lengths.flatten().cumsum(0).view_as(self.lengths)
        in_tail = places - held.shape[2]
        present = chosen < EMPTY
        flat, tail = (present & (in_tail < 0)), (present & (in_tail >= 0))
        start = (ends - self.lengths)[..., None]
        row, head, _ = tail.nonzero(as_tuple=True)
        layer = RaggedLayer()
        keys, values = (
            _merged(stored, (start + places)[flat], room[row, head, in_tail[tail]], flat, present)
            for stored, room in ((self.keys, self._key_room), (self.values, self._value_room))
        )
        layer._fill(keys, values, chosen)
        layer.seen, layer._newest = self.seen, self._newest
        return layer

    def _take_rows(self, rows: Tensor) -> None:
        spans = self.lengths.sum(dim=1).tolist()
        taken = rows.tolist()

        def take(flat: Tensor) -> Tensor:
            parts = flat.split(spans)  # type: ignore[no-untyped-call]
            return torch.cat([parts[row] for row in taken]) if taken else flat[:0]

        self.keys, self.values = take(self.keys), take(self.values)
        self._flat_positions = take(self._flat_positions)
        self.lengths = self.lengths[rows]
        self._key_room, self._value_room = self._key_room[rows], self._value_room[rows]
        self._position_room = self._position_room[rows]

    def _fill(self, keys: Tensor, values: Tensor, positions: Tensor) -> None:
        """Become keys and values [M, D], one for each of `positions` [B, H, S] not `EMPTY`."""
        present = positions < EMPTY
        self.lazy_initialization(keys, values)
        self.keys, self.values = keys, values
        self.lengths = present.sum(dim=-1)
        self._flat_positions = positions[present].int()
        batch, heads, _ = positions.shape
        self._key_room = keys.new_empty(batch, heads, 0, keys.shape[1])
        self._value_room = values.new_empty(batch, heads, 0, values.shape[1])
        self._position_room = positions.new_empty(batch, 1, 0)


def ragged_layer(
    keys: Tensor, values: Tensor, positions: Tensor, slots: tuple[Tensor, Tensor, Tensor]
) -> RaggedLayer:
    """The tokens of keys and values [R, H, N, D] that have a position.

    `slots` are row, head and place of each, together of shape [B, H, S]; `positions` [B, H, S]
    int64 is `EMPTY` where there is no token.
    """
    present = positions < EMPTY
    found = tuple(part.expand(positions.shape)[present] for part in slots)
    layer = RaggedLayer()
    layer._fill(keys[found], values[found], positions)
    return layer


def _merged(
    stored: Tensor, places: Tensor, others: Tensor, from_stored: Tensor, present: Tensor
) -> Tensor:
    """Tokens [M, D] of all `present` slots: those `from_stored` at `places`, then `others`."""
    merged = stored.new_empty(int(present.sum()), stored.shape[1])
    own = from_stored[present]
    merged[own] = stored[places]
    merged[~own] = others
    return merged
