"""Where the tokens of each head lie in flat storage.

Everything here depends on the lengths alone, which change only when tokens are evicted: it is
computed when a form of attention first needs it, and kept for every token that is decoded after.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

_BLOCK = 32  # tokens per block
_LONG_BLOCK = 128
_LONG = 1024  # tokens per head, on average, from which blocks are long
_SHORTEST_PIECE = 128  # tokens
_MOST_PIECES = 32  # per head: they are merged one after the other


@dataclass(frozen=True, eq=False)
class RaggedLayout:
    """Flat storage of heads of given lengths: batch entry by entry, head by head.

    A head below is one KV head of one batch entry, R = B * H of them.
    """

    lengths: Tensor
    """[B, H] int64, tokens of each head, 0 or more. Not to be changed in place."""

    @cached_property
    def counts(self) -> list[int]:
        """The R lengths as numbers, read from the device once."""
        counts: list[int] = self.lengths.flatten().tolist()
        return counts

    @cached_property
    def stored(self) -> int:
        """M, tokens of all heads."""
        return sum(self.counts)

    @cached_property
    def longest(self) -> int:
        """Tokens of the longest head, 0 without heads."""
        return max(self.counts, default=0)

    @cached_property
    def has_empty(self) -> bool:
        """Whether some head has no token."""
        return min(self.counts, default=0) == 0

    @cached_property
    def starts(self) -> Tensor:
        """[R + 1] int64: head r lies in [starts[r], starts[r + 1])."""
        return torch.nn.functional.pad(self.lengths.flatten().cumsum(0), (1, 0))

    @cached_property
    def others(self) -> Tensor:
        """[R, 1, M] float32, added to logits: 0 for a head's own tokens, -inf for all others."""
        token = torch.arange(self.stored, device=self.lengths.device)
        first, end = self.starts[:-1, None, None], self.starts[1:, None, None]
        hidden = (token < first) | (token >= end)
        return torch.zeros(hidden.shape, device=token.device).masked_fill_(hidden, -torch.inf)

    @cached_property
    def piece(self) -> int:
        """Tokens per piece of the fused kernel, a power of two."""
        needed = -(-self.longest // _MOST_PIECES)
        return max(_SHORTEST_PIECE, 1 << max(0, needed - 1).bit_length())

    def pieces(self, piece: int) -> Pieces:
        """Every head cut into pieces of `piece` tokens; kept while the same length is asked for."""
        kept: Pieces | None = self.__dict__.get("_pieces")
        if kept is None or kept.piece != piece:
            cut = (self.lengths.flatten() + piece - 1) // piece  # [R]
            first = torch.nn.functional.pad(cut.cumsum(0), (1, 0))
            head = torch.repeat_interleave(torch.arange(len(cut), device=cut.device), cut)
            kept = self.__dict__["_pieces"] = Pieces(piece=piece, head=head.int(), first=first)
        return kept

    @cached_property
    def blocks(self) -> Blocks:
        """The storage cut into blocks of equal size."""
        heads, stored = len(self.counts), self.stored
        device = self.lengths.device
        block = _LONG_BLOCK if stored >= _LONG * heads else _BLOCK
        starts, stops = self.starts[:-1], self.starts[1:]
        spanned = torch.where(starts < stops, (stops - 1) // block - starts // block + 1, 0)
        head = torch.repeat_interleave(torch.arange(heads, device=device), spanned)
        before = (spanned.cumsum(0) - spanned)[head]
        number = (starts // block)[head] + torch.arange(head.shape[0], device=device) - before
        whole = stored // block
        fresh = number.diff(prepend=number.new_tensor([-1])) != 0
        lies = fresh & (number < whole)
        order = torch.cat([lies.nonzero()[:, 0], (~lies).nonzero()[:, 0]])
        head, number = head[order], number[order]
        index = number[:, None] * block + torch.arange(block, device=device)
        foreign = (index < starts[head][:, None]) | (index >= stops[head][:, None])
        copied = index[whole:].clamp_max(stored - 1)
        return Blocks(block=block, whole=whole, head=head, foreign=foreign, copied=copied)


@dataclass(frozen=True, kw_only=True)
class Blocks:
    """Which head is multiplied with which block: whole blocks first, then copied ones."""

    block: int
    """Tokens per block."""
    whole: int
    """Blocks taken where they lie, the first ones of the storage."""
    head: Tensor
    """[I] int64, the head of each pair of a head and a block."""
    foreign: Tensor
    """[I, block] bool, True for tokens of other heads."""
    copied: Tensor
    """[I - whole, block] int64 indices of the tokens of copied blocks."""

    def uncopied(self, flat: Tensor) -> Tensor:
        """Keys or values [M, D] as [whole, block, D]: no copy."""
        return flat[: self.whole * self.block].view(self.whole, self.block, *flat.shape[1:])


@dataclass(frozen=True, kw_only=True)
class Pieces:
    """Stretches of equal size of every head, the last one of a head shorter."""

    piece: int
    """Tokens per piece."""
    head: Tensor
    """[P] int32, the head of each piece."""
    first: Tensor
    """[R + 1] int64: the pieces of head r are first[r] .. first[r + 1] - 1."""
