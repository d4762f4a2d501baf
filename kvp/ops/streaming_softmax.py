"""Causal softmax attention of a range of queries, one block of queries at a time.

The T x T matrix never exists. `future_attention` is defined with these blocks, `column_sums` is
what H2O accumulates. Not differentiable: importance is a label, never a loss.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from kvp.ops.group_products import group_products


@torch.no_grad()
def attention_blocks(
    queries: Tensor, keys: Tensor, start: int, stop: int, block: int
) -> Iterator[Tensor]:
    """Yield softmax_i(q_j . k_i / sqrt(D)) over i <= j, for the queries j in [start, stop).

    Reads nothing outside queries[start:stop] and keys[:stop], so padding may hold anything.

    Args:
        queries: [..., G, T, D] float after RoPE, G query heads of one KV head.
        keys: [..., T, D] float after RoPE.
        start: first query.
        stop: one past the last query.
        block: queries per yielded tensor.

    Yields:
        [..., G, count, end] float32 probabilities of the queries end - count .. end - 1 over the
        keys 0 .. end - 1, computed in float32; those of one query sum to 1.

    Raises:
        ValueError: shapes disagree, or the range is not inside the sequence.
    """
    check_queries(queries, keys, start, stop, block)
    width = keys.shape[-1]
    for first in range(start, stop, block):
        end = min(first + block, stop)
        scaled = queries[..., first:end, :].float() * width**-0.5  # [..., G, count, D]
        logits = group_products(scaled, keys[..., :end, :].float())  # [..., G, count, end]
        key, query = torch.arange(end, device=keys.device), torch.arange(first, end)
        hidden = key > query.to(keys.device)[:, None]  # [count, end]
        yield logits.masked_fill_(hidden, -torch.inf).softmax(dim=-1)


@torch.no_grad()
def column_sums(queries: Tensor, keys: Tensor, block: int = 256) -> Tensor:
    """Accumulated attention sum_{j=0}^{N-1} softmax_i(q_gj . k_i / sqrt(D)), causal.

    Reductions over the query heads of a group differ between methods and are left to them.

    Args:
        queries: [..., G, N, D] float after RoPE.
        keys: [..., N, D] float after RoPE.
        block: queries handled at a time; bounds memory at [..., G, block, N] float32.

    Returns:
        [..., G, N] float32; sums to N over the tokens.

    Raises:
        ValueError: shapes disagree.
    """
    tokens = keys.shape[-2]
    sums = torch.zeros(*queries.shape[:-1], dtype=torch.float32, device=keys.device)
    for attention in attention_blocks(queries, keys, 0, tokens, block):
        sums[..., : attention.shape[-1]] += attention.sum(dim=-2)  # [..., G, end]
    return sums


def check_queries(queries: Tensor, keys: Tensor, start: int, stop: int, block: int) -> None:
    """Raise ValueError unless the queries start <= j < stop lie in the sequence.

    Queries are [..., G, T, D], keys [..., T, D], `block` is at least 1.
    """
    tokens = keys.shape[-2] if keys.ndim > 1 else 0
    if queries.ndim != keys.ndim + 1 or queries.shape[:-3] + queries.shape[-2:] != keys.shape:
        raise ValueError(
            f"queries [..., G, T, D] and keys [..., T, D] disagree: "
            f"{tuple(queries.shape)} and {tuple(keys.shape)}"
        )
    if not 0 <= start <= stop <= tokens or block < 1:
        raise ValueError(f"no queries [{start}, {stop}) in blocks of {block} among {tokens}")
