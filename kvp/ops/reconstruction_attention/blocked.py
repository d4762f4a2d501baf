"""The replay signal, a block of queries at a time."""

from __future__ import annotations

import torch
from torch import Tensor

from kvp.ops.group_products import group_products
from kvp.ops.reconstruction_attention.reference import check_shapes


@torch.no_grad()
def reconstruction_attention(
    queries: Tensor,
    keys: Tensor,
    own: Tensor,
    *,
    scaling: float,
    key_weights: Tensor | None = None,
    query_weights: Tensor | None = None,
    block: int = 256,
) -> Tensor:
    """`reconstruction_attention_reference` with [..., G, block, S + T] float32 of working memory.

    Arguments, result and errors are those of the reference; `block` is the number of queries
    handled at a time (ValueError below 1).
    """
    check_shapes(queries, keys, own, key_weights, query_weights)
    if block < 1:
        raise ValueError(f"blocks need at least one query, got {block}")
    tokens = own.shape[-2]
    signal = torch.zeros(keys.shape[:-1], dtype=torch.float32, device=keys.device)
    cached_keys, own_keys = keys.float(), own.float()
    index = torch.arange(tokens, device=own.device)
    for start in range(0, tokens, block):
        stop = min(start + block, tokens)
        rows = scaling * queries[..., start:stop, :].float()
        to_cached = group_products(rows, cached_keys)  # [..., G, rows, S]
        to_own = group_products(rows, own_keys[..., :stop, :])  # [..., G, rows, stop]
        to_own.masked_fill_(index[:stop] > index[start:stop, None], -torch.inf)
        total = torch.logaddexp(to_cached.logsumexp(dim=-1), to_own.logsumexp(dim=-1))
        if query_weights is not None:
            total = total - query_weights.float()[..., None, start:stop].log()
        # The maximum is taken of logarithms: one exponential per key instead of one per query.
        largest = to_cached.sub_(total[..., None]).amax(dim=-2).exp()  # [..., G, S]
        if key_weights is not None:
            largest = largest * key_weights.float()
        signal = torch.maximum(signal, largest.amax(dim=-2))
    return signal
