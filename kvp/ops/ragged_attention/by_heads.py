"""Ragged attention of chunks of tokens: products head by head, one softmax for many heads.

Logits are small next to keys and values, so they may be padded to the longest head; keys and values
are read where they lie and never copied.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from kvp.ops.ragged_attention.layout import RaggedLayout
from kvp.ops.ragged_attention.reference import capped, working_dtype

_WORKING_FLOATS = 2**21
"""Padded logits held at a time: 8 MiB in float32."""


def attend_by_heads(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    layout: RaggedLayout,
    tail_keys: Tensor,
    tail_values: Tensor,
    tail_visible: Tensor | None,
    scaling: float,
    *,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    working_floats: int = _WORKING_FLOATS,
) -> Tensor:
    """`ragged_attention_reference`, two matrix products per head and one softmax per part.

    A part is as many entries of the batch, or as many tokens of one, as keep its logits, padded to
    its longest head, below `working_floats`.
    """
    heads, flat = layout.lengths.shape[1], layout.counts
    head_keys, head_values = (
        stored.split(flat)  # type: ignore[no-untyped-call]
        for stored in (keys, values)
    )
    attended = torch.empty_like(query, memory_format=torch.contiguous_format)
    width = layout.longest + tail_keys.shape[2]
    for part, span in _parts(query, width, working_floats):
        of_heads = slice(part.start * heads, part.stop * heads)
        attended[part, :, span] = _attend(
            query[part, :, span],
            scaling,
            head_keys[of_heads],
            head_values[of_heads],
            tail_keys[part],
            tail_values[part],
            None if tail_visible is None else tail_visible[part, span],
            softcap,
            sinks,
        )
    return attended


def _parts(query: Tensor, width: int, working_floats: int) -> Iterator[tuple[slice, slice]]:
    """Parts of the batch and of the tokens whose logits are held together."""
    batch, query_heads, tokens, _ = query.shape
    fit = max(1, working_floats // max(1, query_heads * width))  # tokens, of any entry
    if fit >= tokens:
        step = max(1, fit // max(1, tokens))
        for entry in range(0, batch, step):
            yield slice(entry, min(entry + step, batch)), slice(0, tokens)
        return
    for entry in range(batch):
        for token in range(0, tokens, fit):
            yield slice(entry, entry + 1), slice(token, min(token + fit, tokens))


def _attend(
    query: Tensor,
    scaling: float,
    head_keys: tuple[Tensor, ...],
    head_values: tuple[Tensor, ...],
    tail_keys: Tensor,
    tail_values: Tensor,
    tail_visible: Tensor | None,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """Attention of queries [B, H * G, T, D] over B * H flat parts and their tails."""
    batch, heads, tail, _ = tail_keys.shape
    tokens, width = query.shape[2:]
    working = working_dtype(query)
    # [B * H, G * T, D]
    packed = scaling * query.to(working).reshape(batch * heads, -1, width)
    longest = max(len(part) for part in head_keys)
    slots = longest + tail + (sinks is not None)  # the sink is the last one
    logits = packed.new_full((*packed.shape[:2], slots), -torch.inf)
    for out, queries, part in zip(logits, packed, head_keys, strict=True):
        out[:, : len(part)] = capped(queries @ part.to(working).t(), softcap)
    if tail:
        to_tail = logits[..., longest : longest + tail]
        products = packed @ tail_keys.to(working).flatten(0, 1).transpose(1, 2)
        to_tail.copy_(capped(products, softcap))
        if tail_visible is not None:
            hidden = ~tail_visible[:, None, None]
            to_tail.view(batch, heads, -1, tokens, tail).masked_fill_(hidden, -torch.inf)
    if sinks is not None:
        of_token = sinks.to(working).view(heads, -1, 1).expand(batch, -1, -1, tokens)
        logits[..., -1] = of_token.reshape(batch * heads, -1)
    attention = logits.softmax(dim=-1)
    if min(len(part) for part in head_keys) == 0:  # else every query sees something
        attention.masked_fill_((logits == -torch.inf).all(dim=-1, keepdim=True), 0.0)
    parts = zip(attention, head_values, strict=True)
    attended = torch.stack([weights[:, : len(p)] @ p.to(working) for weights, p in parts])
    if tail:
        attended += attention[..., longest : longest + tail] @ tail_values.to(working).flatten(0, 1)
    return attended.view(query.shape)
