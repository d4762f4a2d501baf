"""Largest attention every cached token receives from an extra pass (KVzip, ContrastKV)."""

from __future__ import annotations

import torch
from torch import Tensor

from kvp.ops.group_products import group_products


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
    """Signal s_i = max over g, j of u_j * w_gi * softmax_i(scaling * q_gj . k_i).

    The softmax of query j of the pass runs over every given cached key and over the pass's own keys
    0..j (KVzip, arXiv 2505.23416, section 3). Weights are those of KVzip+; without them the signal
    lies in [0, 1]. O(G T (S + T) D).

    Args:
        queries: [..., G, T, D] float after RoPE, the queries of the pass.
        keys: [..., S, D] float after RoPE, the cached keys that take part.
        pass_keys: [..., T, D] float after RoPE, the keys of the pass itself.
        scaling: factor on the dot products, 1/sqrt(D) in most models.
        key_weights: [..., G, S] float w, or None for 1.
        query_weights: [..., T] float u, or None for 1.
        block: queries handled at a time; bounds memory at [..., G, block, S + T] float32.

    Returns:
        [..., S] float32.
    """
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
