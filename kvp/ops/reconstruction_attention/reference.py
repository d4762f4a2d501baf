"""The definition of the replay signal, with the whole attention matrix in memory."""

from __future__ import annotations

import torch
from torch import Tensor


@torch.no_grad()
def reconstruction_attention_reference(
    queries: Tensor,
    keys: Tensor,
    pass_keys: Tensor,
    *,
    scaling: float,
    key_weights: Tensor | None = None,
    query_weights: Tensor | None = None,
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

    Returns:
        [..., S] float32.

    Raises:
        ValueError: shapes disagree.
    """
    check_shapes(queries, keys, pass_keys, key_weights, query_weights)
    tokens, cached = pass_keys.shape[-2], keys.shape[-2]
    every_key = torch.cat([keys, pass_keys], dim=-2).float()
    logits = scaling * queries.float() @ every_key[..., None, :, :].transpose(-1, -2)
    later = torch.ones(tokens, tokens, dtype=torch.bool, device=pass_keys.device).triu(1)
    logits[..., cached:].masked_fill_(later, -torch.inf)
    attention = logits.softmax(dim=-1)[..., :cached]
    if key_weights is not None:
        attention = attention * key_weights.float()[..., None, :]
    if query_weights is not None:
        attention = attention * query_weights.float()[..., None, :, None]
    return attention.amax(dim=(-3, -2))


def check_shapes(
    queries: Tensor,
    keys: Tensor,
    pass_keys: Tensor,
    key_weights: Tensor | None,
    query_weights: Tensor | None,
) -> None:
    """Raise ValueError unless the arguments of `reconstruction_attention` fit together."""
    *leading, tokens, width = pass_keys.shape
    group = queries.shape[-3] if queries.ndim == pass_keys.ndim + 1 else 0
    cached = keys.shape[-2]
    expected = [
        (queries, (*leading, group, tokens, width)),
        (keys, (*leading, cached, width)),
        (key_weights, (*leading, group, cached)),
        (query_weights, (*leading, tokens)),
    ]
    for tensor, shape in expected:
        if tensor is not None and tuple(tensor.shape) != shape:
            raise ValueError(
                f"queries [..., G, T, D], keys [..., S, D], pass_keys [..., T, D] and weights "
                f"disagree: found {tuple(tensor.shape)} where {shape} fits {tuple(pass_keys.shape)}"
            )
