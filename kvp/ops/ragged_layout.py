"""Where the tokens of heads of different lengths lie, and which heads are computed together."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor
from torch.nn.functional import pad

_LONG = 1024  # tokens of a head from which a call of its own costs nothing
_PADDING = 1024  # padded tokens of a group that cost less than another call
_SHORTEST_PIECE = 128  # tokens
_MOST_PIECES = 32  # per head: they are merged one after the other


@dataclass(frozen=True, eq=False)
class RaggedLayout:
    """Where the tokens of each head lie in flat storage: batch entry by entry, head by head.

    A head below is one KV head of one batch entry, R = B * H of them. All depends on the lengths
    alone, which change only when tokens are evicted: it is computed when a form of attention first
    needs it, and kept for every token that is decoded after.
    """

    lengths: Tensor
    """[B, H] int64, tokens of each head, 0 or more. Not to be changed in place."""
    piece_size: int | None = None
    """Tokens per piece of the kernel; None for as many as give each head 32 pieces at most."""

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
    def starts(self) -> Tensor:
        """[R + 1] int64: head r lies in [starts[r], starts[r + 1])."""
        return pad(self.lengths.flatten().cumsum(0), (1, 0))

    @cached_property
    def piece(self) -> int:
        """Tokens per piece of the kernel, a power of two."""
        needed = -(-max(self.counts, default=0) // _MOST_PIECES)
        return self.piece_size or max(_SHORTEST_PIECE, 1 << max(0, needed - 1).bit_length())

    @cached_property
    def pieces(self) -> tuple[Tensor, Tensor]:
        """Stretches of `piece` tokens of every head, the last one of a head shorter.

        The head of each, [P] int32, and the first of each head, [R + 1] int64.
        """
        cut = (self.lengths.flatten() + self.piece - 1) // self.piece  # [R]
        head = torch.repeat_interleave(torch.arange(len(cut), device=cut.device), cut)
        return head.int(), pad(cut.cumsum(0), (1, 0))

    @cached_property
    def groups(self) -> list[Group]:
        """The heads, the longest first, in groups that are padded by a quarter or by little.

        A head of `_LONG` tokens or more is a group of its own: gathering its tokens would cost more
        than another call.
        """
        members: list[list[int]] = []
        width = stored = padded = 0  # of the latest group
        for head in sorted(range(len(self.counts)), key=lambda head: -self.counts[head]):
            count = self.counts[head]
            wasted = padded + width - count
            if members and width < _LONG and wasted <= max((stored + count) // 4, _PADDING):
                members[-1].append(head)
                stored, padded = stored + count, wasted
            else:
                members.append([head])
                width, stored, padded = count, count, 0
        return [self._group(heads) for heads in members]

    def _group(self, members: list[int]) -> Group:
        """Heads `members`, the longest first."""
        device, counts = self.lengths.device, [self.counts[head] for head in members]
        heads = torch.tensor(sorted(members), device=device)
        lengths, starts = self.lengths.flatten()[heads], self.starts[:-1][heads]
        width = counts[0]
        if counts[-1] == width and members == [*range(members[0], members[0] + len(members))]:
            return Group(heads=heads, width=width, start=sum(self.counts[: members[0]]))
        slot = torch.arange(width, device=device)
        present = slot < lengths[:, None]
        index = (starts[:, None] + slot).where(present, 0)
        return Group(heads=heads, width=width, index=index, present=present)


@dataclass(frozen=True, kw_only=True)
class Group:
    """Heads that share a call, A of them."""

    heads: Tensor
    """[A] int64, ascending."""
    width: int
    """W, tokens of the longest one."""
    start: int = 0
    """Where they lie, if nothing is padded."""
    index: Tensor | None = None
    """[A, W] int64, tokens in flat storage; None where they lie one after the other."""
    present: Tensor | None = None
    """[A, W] bool, slots with a token; None where all have one."""

    def split(self, step: int) -> Iterator[Group]:
        """Parts of at most `step` heads."""
        if step >= len(self.heads):
            yield self
            return
        for first in range(0, len(self.heads), step):
            part = slice(first, first + step)
            yield Group(
                heads=self.heads[part],
                width=self.width,
                start=self.start + first * self.width,
                index=None if self.index is None else self.index[part],
                present=None if self.present is None else self.present[part],
            )

    def tokens(self, flat: Tensor) -> Tensor:
        """Keys or values [M, D] of the heads, [A, W, D]; anything in padded slots."""
        if self.index is not None:
            rows = flat.index_select(0, self.index.flatten())
            return rows.view(*self.index.shape, flat.shape[1])
        end = self.start + len(self.heads) * self.width
        return flat[self.start : end].view(len(self.heads), self.width, flat.shape[1])
