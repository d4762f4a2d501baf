"""Future attention: how much attention every cached token will receive (KVP paper, section 3.1.1).

`received_attention` defines it; `receive_by_tiles` gives the same numbers in the memory of a tile
of at most `TILE` numbers, in which logits of a block of queries become probabilities in place, and
on CUDA devices where triton is installed `kvp.ops.future_attention_kernel` does.
"""

from collections.abc import Iterator
from typing import Literal

import torch
from torch import Tensor

from kvp.ops.attention import check_queries
from kvp.ops.triton_support import has_triton

TILE = 2**23
"""Largest tile, float32 numbers (32 MiB), unless one query alone needs more."""

SMALL_TILE = 2**20
"""Heads share a tile up to this many numbers (4 MiB): short sequences cost fewer calls."""


def future_attention(
    queries: Tensor,
    keys: Tensor,
    prefix_length: int,
    stop: int | None = None,
    weights: Tensor | None = None,
    reduction: Literal["sum", "max"] = "sum",
) -> Tensor:
    """Importance w_i = sum over future queries j in [N, stop) of max_g softmax_i(q_gj . k_i).

    The softmax of query j runs over all keys 0..j (those after the prefix included), scaled by
    1/sqrt(D); the maximum over the G query heads that share the KV head is taken per query (section
    3.1.1, above equation 6). So sum_i w_i <= G * (stop - N). O(G (stop - N) T D). Returns [..., N]
    float32, zeros where there are no future queries. Raises ValueError where shapes disagree, or
    not 0 <= prefix_length <= stop <= T.

    Args:
        queries: [..., G, T, D] float after RoPE. Only queries N..stop-1 are read.
        keys: [..., T, D] float after RoPE. Only keys 0..stop-1 are read.
        prefix_length: N, tokens in the cache when it is compressed.
        stop: end of the future (exclusive); None = T.
        weights: [T] float, >= 0: what the attention of each query counts; None = 1 for all.
        reduction: over the queries, of the weighted attention: `sum` or `max`.
    """
    last = keys.shape[-2] if stop is None else stop
    arguments = (queries, keys, prefix_length, last, prefix_length, reduction)
    if keys.is_cuda and has_triton():
        # Imported here because triton is an extra, and nobody without a GPU should wait for it.
        from kvp.ops import future_attention_kernel as kernel

        return kernel.receive_by_kernel(*arguments, weights=weights)
    return receive_by_tiles(*arguments, weights=weights)


def max_future_attention(
    queries: Tensor,
    keys: Tensor,
    prefix_length: int,
    stop: int | None = None,
    weights: Tensor | None = None,
) -> Tensor:
    """The largest attention that any future query pays: max_j weight_j max_g softmax_i(q_gj . k_i).

    Not the paper's (docs/decisions.md#default-label). All else as `future_attention`.
    """
    return future_attention(queries, keys, prefix_length, stop, weights, "max")


def received_attention(queries: Tensor, keys: Tensor, start: int, stop: int, tokens: int) -> Tensor:
    """The definition of `receive_by_tiles`: a sum over the whole matrix of [..., G, queries, T]."""
    logits: Tensor = queries[..., start:stop, :] @ keys[..., None, :, :].mT / keys.shape[-1] ** 0.5
    index = torch.arange(keys.shape[-2], device=keys.device)
    unseen = index > index[start:stop, None]
    attention = logits.masked_fill(unseen, -torch.inf).softmax(dim=-1)
    return attention.amax(dim=-3)[..., :tokens].sum(dim=-2)


@torch.no_grad()
def receive_by_tiles(
    queries: Tensor,
    keys: Tensor,
    start: int,
    stop: int,
    tokens: int,
    reduction: Literal["sum", "max"] = "sum",
    block: int = 64,
    weights: Tensor | None = None,
) -> Tensor:
    """Attention paid by the queries start <= j < stop to the first N = `tokens` <= stop: [..., N].

    At most `block` queries are handled at a time, fewer where the tile would exceed `TILE`. A token
    that no query may see gets zero. All else, and ValueError, as `future_attention`.
    """
    check_queries(queries, keys, start, stop, block, weights)
    of_query = None if weights is None else weights.to(keys.device, torch.float32)
    group, length, width = queries.shape[-3:]
    every_query = queries.reshape(keys.shape[:-2].numel(), group, length, width)
    every_key = keys.reshape(len(every_query), length, width)
    result = keys.new_zeros(len(every_key), tokens, dtype=torch.float32)
    per_query = group * max(stop, 1)
    block = max(1, min(block, TILE // per_query))
    heads = max(1, SMALL_TILE // (per_query * block))
    for first in range(0, len(every_key), heads):
        span = slice(first, first + heads)
        for paid in _attention_tiles(
            every_query[span], every_key[span, :stop].float(), start, stop, tokens, block, of_query
        ):
            part = result[span, : paid.shape[-1]]
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
    """Yield [h, count, keys], the maximum over G, of queries [h, G, T, D] on keys [h, stop, D]."""
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
