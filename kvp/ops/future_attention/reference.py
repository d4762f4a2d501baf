"""Importance of every cached token as the KVP paper defines it, in plain PyTorch."""

from __future__ import annotations

import torch
from torch import Tensor

from kvp.ops.attention_rows import attention_rows


@torch.no_grad()
def future_attention(
    queries: Tensor, keys: Tensor, cut: int, stop: int | None = None, block: int = 256
) -> Tensor:
    """Importance w_i = sum over future queries j in [cut, stop) of max_g softmax_i(q_gj . k_i).

    The softmax of query j runs over all keys 0..j (those after the cut included), scaled by
    1/sqrt(D); the maximum over the G query heads that share the KV head is taken per query (section
    3.1.1, above equation 6). So sum_i w_i <= G * (stop - cut). O(G (stop - cut) T D).

    Args:
        queries: [..., G, T, D] float after RoPE. Only rows cut..stop-1 are read.
        keys: [..., T, D] float after RoPE. Only rows 0..stop-1 are read.
        cut: N, tokens in the cache when it is compressed.
        stop: end of the future (exclusive); None = T.
        block: queries handled at a time; bounds memory at [..., G, block, T] float32.

    Returns:
        [..., cut] float32 importance. Zeros when there are no future queries.

    Raises:
        ValueError: shapes disagree, or not 0 <= cut <= stop <= T.
    """
    end = keys.shape[-2] if stop is None else stop
    importance = torch.zeros(*keys.shape[:-2], cut, dtype=torch.float32, device=keys.device)
    for rows in attention_rows(queries, keys, cut, end, block):
        importance += rows[..., :cut].amax(dim=-3).sum(dim=-2)
    return importance


@torch.no_grad()
def peak_attention(
    queries: Tensor, keys: Tensor, cut: int, stop: int | None = None, block: int = 256
) -> Tensor:
    """The largest attention that any future query pays: max_j max_g softmax_i(q_gj . k_i).

    Not the paper's: a token that one query needs counts as much as one that all of them read a
    little. Arguments, shapes and errors as `future_attention`; values lie in [0, 1].
    """
    end = keys.shape[-2] if stop is None else stop
    peak = torch.zeros(*keys.shape[:-2], cut, dtype=torch.float32, device=keys.device)
    for rows in attention_rows(queries, keys, cut, end, block):
        peak = torch.maximum(peak, rows[..., :cut].amax(dim=-3).amax(dim=-2))
    return peak
