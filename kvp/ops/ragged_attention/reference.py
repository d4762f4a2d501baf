"""The definition of attention over ragged heads: a loop over the batch and its KV heads."""

from __future__ import annotations

import torch
from torch import Tensor

from kvp.ops.ragged_attention.layout import RaggedLayout


@torch.no_grad()
def ragged_attention_reference(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    lengths: Tensor | RaggedLayout,
    tail_keys: Tensor,
    tail_values: Tensor,
    tail_visible: Tensor | None = None,
    *,
    scaling: float | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attention of new tokens over what each KV head stores: [B, H * G, T, D] -> the same shape.

    A head stores two parts: the flat part, the tokens it kept, of which every query sees all, and
    the tail, the tokens fed since, the same number for all heads. Softmax and sums are in float32
    for half-precision tensors. A query that sees no token gets zeros.

    Args:
        query: [B, H * G, T, D] float after RoPE; query heads of one KV head are neighbours.
        keys: [M, D] float after RoPE, M = sum of `lengths`: batch entry by entry, head by head.
        values: [M, D] float.
        lengths: [B, H] int64, tokens of each head in the flat part, 0 or more.
        tail_keys: [B, H, S, D] float after RoPE, S may be 0.
        tail_values: [B, H, S, D] float.
        tail_visible: [B, T, S] bool, which tail tokens a query sees, or None for all.
        scaling: factor on the dot products, None for 1/sqrt(D).
        softcap: bounds scaled products x to softcap * tanh(x / softcap); None: none.
        sinks: [H * G] float, logit per query head of one slot more whose value is zero; None: none.

    Returns:
        [B, H * G, T, D] in the dtype of `query`.

    Raises:
        ValueError: shapes disagree.
    """
    layout = lengths if isinstance(lengths, RaggedLayout) else RaggedLayout(lengths)
    check_shapes(query, keys, values, layout, tail_keys, tail_values, tail_visible, sinks)
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    (batch, heads), working = layout.lengths.shape, working_dtype(query)
    grouped = query.reshape(batch, heads, -1, *query.shape[2:]).to(working)  # [B, H, G, T, D]
    of_heads = None if sinks is None else sinks.to(working).view(heads, -1)  # [H, G]
    attended, start = torch.zeros_like(grouped), 0
    for entry in range(batch):
        for head in range(heads):
            stop = start + layout.counts[entry * heads + head]
            head_keys = torch.cat([keys[start:stop], tail_keys[entry, head]]).to(working)
            head_values = torch.cat([values[start:stop], tail_values[entry, head]]).to(working)
            logits = capped(scaling * grouped[entry, head] @ head_keys.T, softcap)
            if tail_visible is not None:
                logits[..., stop - start :].masked_fill_(~tail_visible[entry], -torch.inf)
            attention = _weights(logits, None if of_heads is None else of_heads[head])
            attended[entry, head] = attention @ head_values
            start = stop
    return attended.view(query.shape).to(query.dtype)


def _weights(logits: Tensor, sinks: Tensor | None) -> Tensor:
    """Softmax of logits [G, T, S], zeros where all are -inf, beside one slot with logits [G]."""
    slots = logits.shape[-1]
    blind = (logits == -torch.inf).all(dim=-1, keepdim=True)
    if sinks is not None:
        logits = torch.cat([logits, sinks[:, None, None].expand(-1, logits.shape[1], 1)], dim=-1)
    return logits.softmax(dim=-1)[..., :slots].masked_fill(blind, 0.0)


def capped(logits: Tensor, softcap: float | None) -> Tensor:
    """Logits x as softcap * tanh(x / softcap), or as they are without a cap."""
    return logits if softcap is None else softcap * torch.tanh(logits / softcap)


def working_dtype(query: Tensor) -> torch.dtype:
    """Dtype of logits, softmax and sums: float32, or float64 for float64 queries."""
    return torch.promote_types(query.dtype, torch.float32)


def check_shapes(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    layout: RaggedLayout,
    tail_keys: Tensor,
    tail_values: Tensor,
    tail_visible: Tensor | None,
    sinks: Tensor | None = None,
) -> None:
    """Raise ValueError unless the arguments of `ragged_attention` fit together."""
    lengths = layout.lengths
    if query.ndim != 4 or lengths.ndim != 2 or tail_keys.ndim != 4:
        raise ValueError(
            f"query [B, H * G, T, D], lengths [B, H] and tail [B, H, S, D] are needed, found "
            f"{tuple(query.shape)}, {tuple(lengths.shape)} and {tuple(tail_keys.shape)}"
        )
    batch, heads = lengths.shape
    tokens, width = query.shape[2:]
    stored, tail = keys.shape[0], tail_keys.shape[2]
    expected = [
        ("keys", keys, (stored, width)),
        ("values", values, (stored, width)),
        ("tail_keys", tail_keys, (batch, heads, tail, width)),
        ("tail_values", tail_values, (batch, heads, tail, width)),
        ("tail_visible", tail_visible, (batch, tokens, tail)),
        ("sinks", sinks, (query.shape[1],)),
    ]
    for name, tensor, shape in expected:
        if tensor is not None and tuple(tensor.shape) != shape:
            raise ValueError(f"{name} must be {shape}, found {tuple(tensor.shape)}")
    if query.shape[0] != batch or query.shape[1] % heads or layout.stored != stored:
        raise ValueError(
            f"lengths {tuple(lengths.shape)} that sum to {layout.stored} do not fit query "
            f"{tuple(query.shape)} and {stored} stored tokens"
        )
