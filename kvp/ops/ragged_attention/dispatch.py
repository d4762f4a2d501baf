"""Ragged attention in plain PyTorch: the form that is faster for the shapes at hand."""

from __future__ import annotations

import torch
from torch import Tensor

from kvp.ops.ragged_attention.by_blocks import attend_by_blocks
from kvp.ops.ragged_attention.by_heads import attend_by_heads
from kvp.ops.ragged_attention.reference import check_shapes, working_dtype


@torch.no_grad()
def ragged_attention(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    lengths: Tensor,
    tail_keys: Tensor,
    tail_values: Tensor,
    tail_visible: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    scaling: float | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attention of new tokens over what each KV head stores, as `ragged_attention_reference`.

    Same arguments, result and errors. Keys and values are read where they lie. Single tokens go
    block by block, chunks of tokens and half precision head by head; the numbers behind that are in
    `docs/decisions/0024-ragged-heads-lie-flat.md`.
    """
    check_shapes(query, keys, values, lengths, tail_keys, tail_values, tail_visible, bias, sinks)
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    if softcap is not None or sinks is not None:  # known to the form of chunks alone
        return attend_by_heads(
            query, keys, values, lengths, tail_keys, tail_values, tail_visible, scaling, bias,
            softcap=softcap, sinks=sinks,
        )  # fmt: skip
    single = query.shape[2] == 1 and query.dtype == working_dtype(query)
    form = attend_by_blocks if single else attend_by_heads
    return form(query, keys, values, lengths, tail_keys, tail_values, tail_visible, scaling, bias)
