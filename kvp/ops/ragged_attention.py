"""Attention over heads that store different numbers of tokens.

`ragged_attention_reference` is the definition. On CUDA devices where triton is installed,
`kvp.ops.ragged_attention_kernel` decodes; all else is plain PyTorch: heads of like length, side by
side, in one call. A call has a cost of its own, whatever its size: one per head would be slow for
many short heads, one padded to the longest head for heads of very different lengths.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from importlib.util import find_spec

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from kvp.ops.ragged_layout import Group, RaggedLayout

_WORKING = 2**21  # entries of a mask held at a time


@torch.no_grad()
def ragged_attention(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    layout: RaggedLayout,
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
        keys: [M, D] float after RoPE, M tokens as `layout` lists them.
        values: [M, D] float.
        layout: how many tokens each head has in the flat part; the same object for every token
            that is decoded, since it keeps what is computed from it.
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
    arguments = (query, keys, values, layout, tail_keys, tail_values, tail_visible)
    if softcap is not None or sinks is not None:
        return ragged_attention_reference(*arguments, scaling=scaling, softcap=softcap, sinks=sinks)
    _check_shapes(*arguments, sinks)
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    if query.shape[2] == 1 and query.is_cuda and has_triton():
        # Imported here because triton is an extra, and nobody without a GPU should wait for it.
        from kvp.ops import ragged_attention_kernel as kernel

        if query.dtype in kernel.DTYPES and query.shape[-1] <= kernel.WIDEST:
            return kernel.attend_by_kernel(*arguments, scaling)
    return attend_by_size(*arguments, scaling)


@torch.no_grad()
def ragged_attention_reference(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    layout: RaggedLayout,
    tail_keys: Tensor,
    tail_values: Tensor,
    tail_visible: Tensor | None = None,
    *,
    scaling: float | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """`ragged_attention` as a loop over the batch and its KV heads: the definition."""
    _check_shapes(query, keys, values, layout, tail_keys, tail_values, tail_visible, sinks)
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


def _check_shapes(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    layout: RaggedLayout,
    tail_keys: Tensor,
    tail_values: Tensor,
    tail_visible: Tensor | None,
    sinks: Tensor | None,
) -> None:
    batch, heads = layout.lengths.shape
    _, query_heads, tokens, width = query.shape
    tail = tail_keys.shape[2]
    for name, tensor, shape in (
        ("query", query, (batch, query_heads // heads * heads, tokens, width)),
        ("keys", keys, (layout.stored, width)),
        ("values", values, (layout.stored, width)),
        ("tail_keys", tail_keys, (batch, heads, tail, width)),
        ("tail_values", tail_values, (batch, heads, tail, width)),
        ("tail_visible", tail_visible, (batch, tokens, tail)),
        ("sinks", sinks, (query_heads,)),
    ):
        if tensor is not None and tensor.shape != shape:
            raise ValueError(f"{name} must be {shape}, found {tuple(tensor.shape)}")


@cache
def has_triton() -> bool:
    """Whether kernels can be compiled."""
    return find_spec("triton") is not None


def attend_by_size(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    layout: RaggedLayout,
    tail_keys: Tensor,
    tail_values: Tensor,
    tail_visible: Tensor | None,
    scaling: float,
    *,
    working: int = _WORKING,
) -> Tensor:
    """`ragged_attention` without caps and sinks, a call per group of heads.

    Keys and values of a group are copied next to their tail. A mask has at most `working` entries,
    but those of one token and head.
    """
    batch, heads, tail, width = tail_keys.shape
    packed = query.reshape(batch * heads, -1, query.shape[2], width)  # [R, G, T, D]
    late_keys, late_values = tail_keys.flatten(0, 1), tail_values.flatten(0, 1)
    attended = torch.empty_like(packed)
    for group, some in _parts(layout, packed, tail, working):
        of = group.heads
        rows = packed[:, :, some].index_select(0, of)  # [A, G, T, D]
        mask = None
        if tail_visible is not None or group.present is not None:
            seen = rows.new_ones(len(of), 1, group.width + tail, dtype=torch.bool)
            if group.present is not None:
                seen[:, 0, : group.width] = group.present
            if tail_visible is not None:
                seen = seen.repeat(1, rows.shape[2], 1)
                seen[..., group.width :] = tail_visible[of // heads, some]
                seen = seen.repeat(1, rows.shape[1], 1)  # [A, G * T, W + S]
            mask = seen[:, None]
        result = scaled_dot_product_attention(
            rows.flatten(1, 2)[:, None],
            torch.cat([group.tokens(keys), late_keys.index_select(0, of)], dim=1)[:, None],
            torch.cat([group.tokens(values), late_values.index_select(0, of)], dim=1)[:, None],
            attn_mask=mask,
            scale=scaling,
        )
        attended[of, :, some] = result.view(rows.shape)
    return attended.view(query.shape)


def _parts(
    layout: RaggedLayout, packed: Tensor, tail: int, working: int
) -> Iterator[tuple[Group, slice]]:
    """Parts of the groups and of the tokens whose masks are held together."""
    group_size, tokens = packed.shape[1:3]
    for group in layout.groups:
        fit = max(1, working // max(1, group_size * (group.width + tail)))  # tokens, of any head
        span = min(fit, tokens)
        for part in group.split(max(1, fit // max(1, span))):
            for first in range(0, tokens, span):
                yield part, slice(first, first + span)
