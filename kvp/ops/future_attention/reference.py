"""Importance of every cached token as the KVP paper defines it, in plain PyTorch."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from kvp.ops.streaming_softmax import attention_blocks


@torch.no_grad()
def future_attention(
    queries: Tensor,
    keys: Tensor,
    prefix_length: int,
    stop: int | None = None,
    block: int = 256,
    weights: Tensor | None = None,
) -> Tensor:
    """Importance w_i = sum over future queries j in [N, stop) of max_g softmax_i(q_gj . k_i).

    The softmax of query j runs over all keys 0..j (those after the prefix included), scaled by
    1/sqrt(D); the maximum over the G query heads that share the KV head is taken per query (section
    3.1.1, above equation 6). So sum_i w_i <= G * (stop - N). O(G (stop - N) T D).

    Args:
        queries: [..., G, T, D] float after RoPE. Only queries N..stop-1 are read.
        keys: [..., T, D] float after RoPE. Only keys 0..stop-1 are read.
        prefix_length: N, tokens in the cache when it is compressed.
        stop: end of the future (exclusive); None = T.
        block: queries handled at a time; bounds memory at [..., G, block, T] float32.
        weights: [T] float, >= 0: what the attention of each query counts; None = 1 for all. The
            future's sum (here) or maximum (below) is of the weighted attention.

    Returns:
        [..., N] float32 importance. Zeros when there are no future queries.

    Raises:
        ValueError: shapes disagree, or not 0 <= prefix_length <= stop <= T.
    """
    importance = keys.new_zeros(*keys.shape[:-2], prefix_length, dtype=torch.float32)
    for paid in _received(queries, keys, prefix_length, stop, block, weights):
        importance += paid.sum(dim=-2)
    return importance


@torch.no_grad()
def max_future_attention(
    queries: Tensor,
    keys: Tensor,
    prefix_length: int,
    stop: int | None = None,
    block: int = 256,
    weights: Tensor | None = None,
) -> Tensor:
    """The largest attention that any future query pays: max_j weight_j max_g softmax_i(q_gj . k_i).

    Not the paper's: a token that one query needs counts as much as one that all of them read a
    little. Arguments, shapes and errors as `future_attention`; values lie in [0, 1], times the
    weights.
    """
    largest = keys.new_zeros(*keys.shape[:-2], prefix_length, dtype=torch.float32)
    for paid in _received(queries, keys, prefix_length, stop, block, weights):
        largest = torch.maximum(largest, paid.amax(dim=-2))
    return largest


def check_weights(weights: Tensor | None, keys: Tensor) -> None:
    """Raise ValueError unless `weights` is None or [T], one number per query; keys [..., T, D]."""
    if weights is not None and weights.shape != keys.shape[-2:-1]:
        raise ValueError(
            f"weights of queries must be [T], here {tuple(keys.shape[-2:-1])}, "
            f"got {tuple(weights.shape)}"
        )


def _received(
    queries: Tensor,
    keys: Tensor,
    prefix_length: int,
    stop: int | None,
    block: int,
    weights: Tensor | None,
) -> Iterator[Tensor]:
    """Weighted attention [..., count, N] of the next queries, the maximum over the group."""
    check_weights(weights, keys)
    end = keys.shape[-2] if stop is None else stop
    for attention in attention_blocks(queries, keys, prefix_length, end, block):
        paid = attention[..., :prefix_length].amax(dim=-3)
        if weights is not None:
            last = attention.shape[-1]
            paid = paid * weights[last - paid.shape[-2] : last, None].to(paid)
        yield paid
