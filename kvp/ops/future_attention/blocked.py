"""Future attention in one pass over tiles that are reused in place: for CPUs.

Exact like the definition, but the T x T matrix costs a tile of at most `TILE` numbers: for a block
of queries the logits of all keys they may see are computed, turned into probabilities where they
lie, and reduced while they are in the caches. A second pass (log-sum-exp first, column sums second)
would bound the tile by the keys too, at twice the multiplications, which are most of the time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
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
def interval_attention(
    queries: Tensor,
    keys: Tensor,
    edges: Sequence[int],
    tokens: int,
    reduction: Literal["sum", "max"] = "sum",
    block: int = 64,
    weights: Tensor | None = None,
) -> Tensor:
    """Attention paid by the queries of each interval [edges[e], edges[e+1]) to the first tokens.

    Args:
        queries: [..., G, T, D] float after RoPE. Only queries edges[0]..edges[-1]-1 are read.
        keys: [..., T, D] float after RoPE. Only keys 0..edges[-1]-1 are read.
        edges: E + 1 >= 2 query positions that never fall, within 0..T.
        tokens: N <= edges[-1], tokens of the result.
        reduction: over the queries of an interval: `sum` (future attention) or `max` (its maximum).
        block: maximum of queries handled at a time; fewer where the tile would exceed `TILE`.
        weights: [T] float, >= 0: what the attention of each query counts; None = 1 for all.

    Returns:
        [..., E, N] float32, the maximum over the group of softmax_i(q_gj . k_i / sqrt(D)), reduced
        over the queries j; zero where no query of the interval may see the token.

    Raises:
        ValueError: shapes disagree, or edges fall or leave the sequence.
    """
    check_queries(queries, keys, edges, block)
    check_weights(weights, keys)
    of_query = None if weights is None else weights.to(keys.device, torch.float32)
    group, length, width = queries.shape[-3:]
    every_query = queries.reshape(-1, group, length, width)
    every_key = keys.reshape(-1, length, width)
    result = keys.new_zeros(len(every_key), len(edges) - 1, tokens, dtype=torch.float32)
    per_query = group * max(edges[-1], 1)
    block = max(1, min(block, TILE // per_query))
    heads = max(1, SMALL_TILE // (per_query * block))
    for first in range(0, len(every_key), heads):
        some = slice(first, first + heads)
        for interval, paid in _attention_tiles(
            every_query[some], every_key[some, : edges[-1]].float(), edges, tokens, block, of_query
        ):
            part = result[some, interval, : paid.shape[-1]]
            if reduction == "sum":
                part += paid.sum(dim=1)
            else:
                torch.maximum(part, paid.amax(dim=1), out=part)
    return result.reshape(*keys.shape[:-2], len(edges) - 1, tokens)


def _attention_tiles(
    queries: Tensor,
    keys: Tensor,
    edges: Sequence[int],
    tokens: int,
    block: int,
    weights: Tensor | None,
) -> Iterator[tuple[int, Tensor]]:
    """Yield (interval, [h, count, keys] attention of its next queries, maximum over the group).

    queries [h, G, T, D] and keys [h, edges[-1], D] float32 of some heads.
    """
    heads, group, _, width = queries.shape
    transposed = keys.transpose(1, 2)
    tile = keys.new_empty(heads * group * block * edges[-1])
    later = torch.ones(block, block, dtype=torch.bool, device=keys.device).triu_(1)
    for interval, (start, stop) in enumerate(pairwise(edges)):
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
            yield interval, paid if weights is None else paid.mul_(weights[first:end, None])
