"""Future attention in one pass over tiles that are reused in place: for CPUs.

Exact like the definition, but the T x T matrix costs a tile of at most `TILE` numbers: for a block
of queries the logits of all keys they may see are computed, turned into probabilities where they
lie, and reduced while they are in the caches. A second pass (log-sum-exp first, column sums second)
would bound the tile by the keys too, at twice the multiplications, which are most of the time.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

import torch
from torch import Tensor

from kvp.ops.future_attention.reference import check_weights
from kvp.ops.streaming_softmax import check_queries

TILE = 2**23
"""Largest tile, float32 numbers (32 MiB), unless one query alone needs more."""

SMALL_TILE = 2**20
"""Heads share a tile up to this many numbers (4 MiB): short sequences cost fewer calls."""


@torch.no_grad()
def received_attention(
    queries: Tensor,
    keys: Tensor,
    start: int,
    stop: int,
    tokens: int,
    reduction: Literal["sum", "max"] = "sum",
    block: int = 64,
    weights: Tensor | None = None,
) -> Tensor:
    """Attention paid by the queries start <= j < stop to the first tokens.

    Args:
        queries: [..., G, T, D] float after RoPE. Only queries start..stop-1 are read.
        keys: [..., T, D] float after RoPE. Only keys 0..stop-1 are read.
        start: first query, at least 0.
        stop: one past the last query, at most T.
        tokens: N <= stop, tokens of the result.
        reduction: over the queries: `sum` (future attention) or `max` (its maximum).
        block: maximum of queries handled at a time; fewer where the tile would exceed `TILE`.
        weights: [T] float, >= 0: what the attention of each query counts; None = 1 for all.

    Returns:
        [..., N] float32, the maximum over the group of softmax_i(q_gj . k_i / sqrt(D)), reduced
        over the queries j; zero where none of them may see the token.

    Raises:
        ValueError: shapes disagree, or the queries leave the sequence.
    """
    check_queries(queries, keys, start, stop, block)
    check_weights(weights, keys)
    of_query = None if weights is None else weights.to(keys.device, torch.float32)
    group, length, width = queries.shape[-3:]
    every_query = queries.reshape(-1, group, length, width)
    every_key = keys.reshape(-1, length, width)
    result = keys.new_zeros(len(every_key), tokens, dtype=torch.float32)
    per_query = group * max(stop, 1)
    block = max(1, min(block, TILE // per_query))
    heads = max(1, SMALL_TILE // (per_query * block))
    for first in range(0, len(every_key), heads):
        some = slice(first, first + heads)
        for paid in _attention_tiles(
            every_query[some], every_key[some, :stop].float(), start, stop, tokens, block, of_query
        ):
            part = result[some, : paid.shape[-1]]
            if reduction == "sum":
                part += paid.sum(dim=1)
            else:
                torch.maximum(part, paid.amax(dim=1), out=part)
    return result.reshape(*keys.shape[:-2], tokens)


def _attention_tiles(
    queries: Tensor,
    keys: Tensor,
    start: int,
    stop: int,
    tokens: int,
    block: int,
    weights: Tensor | None,
) -> Iterator[Tensor]:
    """Yield [h, count, keys] attention of the next queries, maximum over the group.

    queries [h, G, T, D] and keys [h, stop, D] float32 of some heads.
    """
    heads, group, _, width = queries.shape
    transposed = keys.transpose(1, 2)
    tile = keys.new_empty(heads * group * block * stop)
    later = torch.ones(block, block, dtype=torch.bool, device=keys.device).triu_(1)
    blocks = -(-(stop - start) // block)
    for index in range(blocks):
        first = start + (stop - start) * index // blocks
        end = start + (stop - start) * (index + 1) // blocks
        count = end - first
        scaled = queries[:, :, first:end].float() * width**-0.5
        logits = tile[: heads * group * count * end].view(heads, group * count, end)
        torch.bmm(scaled.reshape(heads, -1, width), transposed[..., :end], out=logits)
        attention = logits.view(heads, group, count, end)
        # Only the last square of keys holds any that its queries may not see.
        attention[..., first:].masked_fill_(later[:count, :count], -torch.inf)
        torch.softmax(logits, dim=-1, out=logits)
        paid = attention[..., :tokens].amax(dim=1)
        yield paid if weights is None else paid.mul_(weights[first:end, None])
