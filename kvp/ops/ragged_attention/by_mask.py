"""Ragged attention of single tokens over little storage: one product of all queries and all tokens.

Every head is multiplied with the tokens of all heads, and those that are not its own are masked:
R times the arithmetic for R heads, in as few operations as dense attention in plain PyTorch. Where
tokens and heads are few, an operation costs more than its arithmetic.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvp.ops.ragged_attention.layout import RaggedLayout
from kvp.ops.ragged_attention.reference import working_dtype


def attend_by_mask(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    layout: RaggedLayout,
    tail_keys: Tensor,
    tail_values: Tensor,
    tail_visible: Tensor | None,
    scaling: float,
) -> Tensor:
    """`ragged_attention_reference` for query [B, H * G, 1, D].

    Working memory: R * G * (M + S) floats, and R * M that stay with `layout`.
    """
    batch, heads, tail, width = tail_keys.shape
    stored, dtype, working = layout.stored, query.dtype, working_dtype(query)
    if dtype != working:
        query, keys, values, tail_keys, tail_values = (
            tensor.to(working) for tensor in (query, keys, values, tail_keys, tail_values)
        )
    packed = (query * scaling).view(-1, width)  # [R * G, D]
    by_head = packed.view(batch * heads, -1, width)  # [R, G, D]
    logits = torch.mm(packed, keys.t()).view(*by_head.shape[:2], stored)
    logits += layout.others
    if tail:
        to_tail = torch.bmm(by_head, tail_keys.flatten(0, 1).transpose(1, 2))  # [R, G, S]
        if tail_visible is not None:
            hidden = ~tail_visible[:, None]  # [B, 1, 1, S]
            to_tail.view(batch, heads, -1, tail).masked_fill_(hidden, -torch.inf)
        logits = torch.cat([logits, to_tail], dim=-1)
    attention = logits.softmax(dim=-1)
    if layout.has_empty and (tail_visible is not None or not tail):
        attention.masked_fill_((logits == -torch.inf).all(dim=-1, keepdim=True), 0.0)
    weights = attention.view(len(packed), stored + tail)  # [R * G, M + S]
    attended = torch.mm(weights[:, :stored], values).view(by_head.shape)
    if tail:
        late = tail_values.flatten(0, 1)
        attended = torch.baddbmm(attended, attention[..., stored:], late)
    return attended.view(query.shape).to(dtype)
