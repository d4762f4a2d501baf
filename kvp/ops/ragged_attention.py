"""Attention over heads that store different numbers of tokens.

`ragged_attention_reference` is the definition. On CUDA devices where triton is installed,
`kvp.ops.ragged_attention_kernel` decodes; all else is plain PyTorch: heads of like length, side by
side, in one call. A call has a cost of its own, whatever its size: one per head would be slow for
many short heads, one padded to the longest head for heads of very different lengths.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention

from kvp.ops.triton_support import has_triton

_LONG = 1024  # tokens of a head from which a call of its own costs nothing
_PADDING = 1024  # padded tokens of a group that cost less than another call
_SHORTEST_PIECE = 128  # tokens
_MOST_PIECES = 32  # per head: they are merged one after the other
_WORKING = 2**21  # entries of a mask held at a time


class StoredTokens(NamedTuple):
    """What the KV heads of a layer store, and which of it new tokens see.

    A head stores two parts: the flat part, the tokens it kept, of which every query sees all, and
    the tail, the tokens fed since, the same number for all heads.
    """

    keys: Tensor
    """[M, D] float after RoPE, M tokens as `layout` lists them."""
    values: Tensor
    """[M, D] float."""
    layout: RaggedLayout
    """How many tokens each head has in the flat part; the same object for every token that is
    decoded, since it keeps what is computed from it."""
    tail_keys: Tensor
    """[B, H, S, D] float after RoPE, S may be 0."""
    tail_values: Tensor
    """[B, H, S, D] float."""
    tail_visible: Tensor | None = None
    """[B, T, S] bool, which tail tokens a query sees, or None for all."""


@torch.no_grad()
def ragged_attention(
    query: Tensor,
    stored: StoredTokens,
    *,
    scaling: float | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attention of new tokens over what each KV head stores: [B, H * G, T, D] -> the same shape.

    Softmax and sums are in float32 for half-precision tensors. A query that sees no token gets
    zeros. All tensors have one dtype, the result's. Raises ValueError where shapes disagree.

    Args:
        query: [B, H * G, T, D] float after RoPE; query heads of one KV head are neighbours.
        stored: keys and values of the heads, and what each query sees.
        scaling: factor on the dot products, None for 1/sqrt(D).
        softcap: bounds scaled products x to softcap * tanh(x / softcap); None: none.
        sinks: [H * G] float, logit per query head of an extra slot whose value is zero, or None.
    """
    if softcap is not None or sinks is not None:
        return ragged_attention_reference(
            query, stored, scaling=scaling, softcap=softcap, sinks=sinks
        )
    _check_shapes(query, stored, sinks)
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    if query.shape[2] == 1 and query.is_cuda and has_triton():
        # Imported here because triton is an extra, and nobody without a GPU should wait for it.
        from kvp.ops import ragged_attention_kernel as kernel

        if query.dtype in kernel.DTYPES and query.shape[-1] <= kernel.WIDEST:
            return kernel.attend_by_kernel(query, stored, scaling)
    return attend_by_size(query, stored, scaling)


@torch.no_grad()
def ragged_attention_reference(
    query: Tensor,
    stored: StoredTokens,
    *,
    scaling: float | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """`ragged_attention` as a loop over the batch and its KV heads: the definition."""
    _check_shapes(query, stored, sinks)
    keys, values, layout, tail_keys, tail_values, tail_visible = stored
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    working = torch.promote_types(query.dtype, torch.float32)  # of logits, softmax and sums
    batch, heads = layout.lengths.shape
    grouped = query.reshape(batch, heads, -1, *query.shape[2:]).to(working)  # [B, H, G, T, D]
    of_heads = None if sinks is None else sinks.to(working).view(heads, -1)  # [H, G]
    attended, start = torch.zeros_like(grouped), 0
    for entry in range(batch):
        for head in range(heads):
            stop = start + layout.counts[entry * heads + head]
            head_keys = torch.cat([keys[start:stop], tail_keys[entry, head]]).to(working)
            head_values = torch.cat([values[start:stop], tail_values[entry, head]]).to(working)
            logits = cap_logits(scaling * grouped[entry, head] @ head_keys.T, softcap)
            if tail_visible is not None:
                logits[..., stop - start :].masked_fill_(~tail_visible[entry], -torch.inf)
            attention = _weights(logits, None if of_heads is None else of_heads[head])
            attended[entry, head] = attention @ head_values
            start = stop
    return attended.view(query.shape).to(query.dtype)


def _weights(logits: Tensor, sinks: Tensor | None) -> Tensor:
    """Softmax of logits [G, T, S], zeros where all are -inf, with one extra slot of logits [G]."""
    slots = logits.shape[-1]
    blind = (logits == -torch.inf).all(dim=-1, keepdim=True)
    if sinks is not None:
        logits = torch.cat([logits, sinks[:, None, None].expand(-1, logits.shape[1], 1)], dim=-1)
    return logits.softmax(dim=-1)[..., :slots].masked_fill(blind, 0.0)


def cap_logits(logits: Tensor, softcap: float | None) -> Tensor:
    """Logits x as softcap * tanh(x / softcap), or as they are without a cap."""
    return logits if softcap is None else softcap * torch.tanh(logits / softcap)


def _check_shapes(query: Tensor, stored: StoredTokens, sinks: Tensor | None) -> None:
    layout = stored.layout
    batch, heads = layout.lengths.shape
    _, query_heads, tokens, width = query.shape
    tail = stored.tail_keys.shape[2]
    for name, tensor, shape in (
        ("query", query, (batch, query_heads // heads * heads, tokens, width)),
        ("keys", stored.keys, (layout.stored, width)),
        ("values", stored.values, (layout.stored, width)),
        ("tail_keys", stored.tail_keys, (batch, heads, tail, width)),
        ("tail_values", stored.tail_values, (batch, heads, tail, width)),
        ("tail_visible", stored.tail_visible, (batch, tokens, tail)),
        ("sinks", sinks, (query_heads,)),
    ):
        if tensor is not None and tensor.shape != shape:
            raise ValueError(f"{name} must be {shape}, found {tuple(tensor.shape)}")


def attend_by_size(
    query: Tensor, stored: StoredTokens, scaling: float, *, working: int = _WORKING
) -> Tensor:
    """`ragged_attention` without caps and sinks, a call per group of heads.

    Keys and values of a group are copied next to their tail. A mask has at most `working` entries,
    unless one token of one head needs more.
    """
    keys, values, layout, tail_keys, tail_values, tail_visible = stored
    batch, heads, tail, width = tail_keys.shape
    packed = query.reshape(batch * heads, -1, query.shape[2], width)  # [R, G, T, D]
    late_keys, late_values = tail_keys.flatten(0, 1), tail_values.flatten(0, 1)
    attended = torch.empty_like(packed)
    for group, span in _parts(layout, packed, tail, working):
        members = group.heads
        rows = packed[:, :, span].index_select(0, members)  # [A, G, T, D]
        mask = None
        if tail_visible is not None or group.present is not None:
            seen = rows.new_ones(len(members), 1, group.width + tail, dtype=torch.bool)
            if group.present is not None:
                seen[:, 0, : group.width] = group.present
            if tail_visible is not None:
                seen = seen.repeat(1, rows.shape[2], 1)
                seen[..., group.width :] = tail_visible[members // heads, span]
                seen = seen.repeat(1, rows.shape[1], 1)  # [A, G * T, W + S]
            mask = seen[:, None]
        result = scaled_dot_product_attention(
            rows.flatten(1, 2)[:, None],
            torch.cat([group.tokens(keys), late_keys.index_select(0, members)], dim=1)[:, None],
            torch.cat([group.tokens(values), late_values.index_select(0, members)], dim=1)[:, None],
            attn_mask=mask,
            scale=scaling,
        )
        attended[members, :, span] = result.view(rows.shape)
    return attended.view(query.shape)


def _parts(
    layout: RaggedLayout, packed: Tensor, tail: int, working: int
) -> Iterator[tuple[HeadGroup, slice]]:
    """Parts of the groups and of the tokens whose masks are held together."""
    group_size, tokens = packed.shape[1:3]
    for group in layout.groups:
        fit = max(1, working // max(1, group_size * (group.width + tail)))  # tokens, of any head
        span = min(fit, tokens)
        for part in group.split(max(1, fit // max(1, span))):
            for first in range(0, tokens, span):
                yield part, slice(first, first + span)


@dataclass(frozen=True, eq=False)
class RaggedLayout:
    """Where the tokens of each head lie in flat storage: batch entry by entry, head by head.

    A head below is one KV head of one batch entry, R = B * H of them. All depends on the lengths
    alone, which change only when tokens are evicted: it is computed when a form of attention first
    needs it, and kept for every token decoded afterwards.
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
    def groups(self) -> list[HeadGroup]:
        """The heads, the longest first, in groups whose padding is a quarter at most, or little.

        A head of `_LONG` tokens or more is a group: another call costs less than gathering tokens.
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

    def _group(self, members: list[int]) -> HeadGroup:
        """Heads `members`, the longest first."""
        device, counts = self.lengths.device, [self.counts[head] for head in members]
        heads = torch.tensor(sorted(members), device=device)
        lengths, starts = self.lengths.flatten()[heads], self.starts[:-1][heads]
        width = counts[0]
        if counts[-1] == width and members == [*range(members[0], members[0] + len(members))]:
            return HeadGroup(heads=heads, width=width, start=sum(self.counts[: members[0]]))
        slot = torch.arange(width, device=device)
        present = slot < lengths[:, None]
        index = (starts[:, None] + slot).where(present, 0)
        return HeadGroup(heads=heads, width=width, index=index, present=present)


@dataclass(frozen=True, kw_only=True)
class HeadGroup:
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

    def split(self, step: int) -> Iterator[HeadGroup]:
        """Parts of at most `step` heads."""
        for first in range(0, len(self.heads), step):
            part = slice(first, first + step)
            yield replace(
                self,
                heads=self.heads[part],
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
