"""Ragged attention of single tokens: flat storage read in blocks of equal size.

A batched matrix product takes every block as it lies in memory against the query of the head its
first token belongs to. Where heads meet inside a block, the block is copied once per further head;
logits of other heads' tokens are masked. Few operations, whatever the number of heads.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

_BLOCK = 32  # tokens per block
_LONG_BLOCK = 128
_LONG = 1024  # tokens per head, on average, from which blocks are long


def attend_by_blocks(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    lengths: Tensor,
    tail_keys: Tensor,
    tail_values: Tensor,
    tail_visible: Tensor | None,
    scaling: float,
    bias: Tensor | None = None,
) -> Tensor:
    """`ragged_attention_reference` for query [B, H * G, T, D] in float32 or float64, T small.

    Working memory: G * T * (1 + D / block) floats per stored token.
    """
    batch, heads, tail, width = tail_keys.shape
    # [B * H, G * T, D]
    packed = scaling * query.reshape(batch * heads, query[0].numel() // (heads * width), width)
    plan = _plan(lengths.flatten(), keys.shape[0])
    copied_keys, copied_values = keys[plan.copied], values[plan.copied]
    whole = plan.uncopied(keys), plan.uncopied(values)
    count = whole[0].shape[0]
    queries = packed[plan.head]
    logits = queries.new_empty(*queries.shape[:2], plan.block)
    torch.bmm(queries[:count], whole[0].transpose(1, 2), out=logits[:count])
    torch.bmm(queries[count:], copied_keys.transpose(1, 2), out=logits[count:])
    if bias is not None:
        logits[:count] += plan.uncopied(bias)[:, None]
        logits[count:] += bias[plan.copied][:, None]
    logits.masked_fill_(plan.foreign[:, None], -torch.inf)
    to_tail = packed @ tail_keys.flatten(0, 1).transpose(1, 2)
    if tail_visible is not None:
        hidden = ~tail_visible[:, None, None]
        shape = (batch, heads, query.shape[1] // heads, query.shape[2], tail)
        to_tail.view(shape).masked_fill_(hidden, -torch.inf)
    highest = torch.cat([to_tail, torch.full_like(packed[..., :1], -torch.inf)], dim=-1).amax(-1)
    of_block = plan.head[:, None].expand(-1, packed.shape[1])
    highest = highest.scatter_reduce(0, of_block, logits.amax(dim=-1), "amax")
    highest.masked_fill_(highest == -torch.inf, 0.0)
    logits.sub_(highest[plan.head][..., None]).exp_()
    to_tail.sub_(highest[..., None]).exp_()
    total = to_tail.sum(dim=-1).index_add_(0, plan.head, logits.sum(dim=-1))
    parts = torch.empty_like(queries)
    torch.bmm(logits[:count], whole[1], out=parts[:count])
    torch.bmm(logits[count:], copied_values, out=parts[count:])
    attended = (to_tail @ tail_values.flatten(0, 1)).index_add_(0, plan.head, parts)
    attended /= total.clamp_min(torch.finfo(total.dtype).tiny)[..., None]
    return attended.view(query.shape)


@dataclass(frozen=True, kw_only=True)
class _Plan:
    """Which head is multiplied with which block: whole blocks first, then copied ones."""

    block: int
    """Tokens per block."""
    whole: int
    """Blocks taken where they lie, the first ones of the storage."""
    head: Tensor
    """[I] int64, batch entry * H + KV head of each pair of a head and a block."""
    foreign: Tensor
    """[I, block] bool, True for tokens of other heads."""
    copied: Tensor
    """[I - whole, block] int64 indices of the tokens of copied blocks."""

    def uncopied(self, flat: Tensor) -> Tensor:
        """Keys or values [M, D] as [whole, block, D], a bias [M] as [whole, block]: no copy."""
        return flat[: self.whole * self.block].view(self.whole, self.block, *flat.shape[1:])


def _plan(lengths: Tensor, stored: int) -> _Plan:
    device = lengths.device
    block = _LONG_BLOCK if stored >= _LONG * lengths.shape[0] else _BLOCK
    stops = lengths.cumsum(0)
    starts = stops - lengths
    spanned = torch.where(lengths > 0, (stops - 1) // block - starts // block + 1, 0)
    head = torch.repeat_interleave(torch.arange(lengths.shape[0], device=device), spanned)
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
    return _Plan(block=block, whole=whole, head=head, foreign=foreign, copied=copied)
