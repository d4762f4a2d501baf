"""Ragged attention of single tokens: flat storage read in blocks of equal size.

A batched matrix product takes every block as it lies in memory against the query of the head its
first token belongs to. Where heads meet inside a block, the block is copied once per further head;
logits of other heads' tokens are masked. Few operations, whatever the number of heads.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvp.ops.ragged_attention.layout import RaggedLayout


def attend_by_blocks(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    layout: RaggedLayout,
    tail_keys: Tensor,
    tail_values: Tensor,
    tail_visible: Tensor | None,
    scaling: float,
) -> Tensor:
    """`ragged_attention_reference` for query [B, H * G, T, D] in float32 or float64, T small.

    Working memory: G * T * (1 + D / block) floats per stored token.
    """
    batch, heads, tail, width = tail_keys.shape
    # [B * H, G * T, D]
    packed = scaling * query.reshape(batch * heads, query[0].numel() // (heads * width), width)
    plan = layout.blocks
    copied_keys, copied_values = keys[plan.copied], values[plan.copied]
    whole = plan.uncopied(keys), plan.uncopied(values)
    count = whole[0].shape[0]
    queries = packed[plan.head]
    logits = queries.new_empty(*queries.shape[:2], plan.block)
    torch.bmm(queries[:count], whole[0].transpose(1, 2), out=logits[:count])
    torch.bmm(queries[count:], copied_keys.transpose(1, 2), out=logits[count:])
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
