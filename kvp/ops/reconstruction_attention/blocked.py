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
    pass_keys: Tensor,
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
    check_shapes(queries, keys, pass_keys, key_weights, query_weights)
    if block < 1:
        raise ValueError(f"blocks need at least one query, got {block}")
    tokens = pass_keys.shape[-2]
    signal = torch.zeros(keys.shape[:-1], dtype=torch.float32, device=keys.device)
    cached_keys, pass_keys = keys.float(), pass_keys.float()
    index = torch.arange(tokens, device=pass_keys.device)
    for start in range(0, tokens, block):
        stop = min(start + block, tokens)
        scaled = scaling * queries[..., start:stop, :].float()
        to_cached = group_products(scaled, cached_keys)  # [..., G, block, S]
        to_pass = group_products(scaled, pass_keys[..., :stop, :])  # [..., G, block, stop]
        to_pass.masked_fill_(index[:stop] > index[start:stop, None], -torch.inf)
        total = torch.logaddexp(to_cached.logsumexp(dim=-1), to_pass.logsumexp(dim=-1))
        if query_weights is not None:
            total = total - query_weights.float()[..., None, start:stop].log()
        # The maximum is taken of logarithms: one exponential per key instead of one per query.
        largest = to_cached.sub_(total[..., None]).amax(dim=-2).exp()  # [..., G, S]
        if key_weights is not None:
            largest = largest * key_weights.float()
        signal = torch.maximum(signal, largest.amax(dim=-2))
    return signal
