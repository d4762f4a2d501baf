"""Softmax attention of grouped queries: of the last ones, summed per key, and of an extra pass.

The T x T matrix never exists. Not differentiable: importance is a label, never a loss.
"""

import torch
from torch import Tensor


def group_products(queries: Tensor, keys: Tensor) -> Tensor:
    """Products q_gr . k_i of queries [..., G, R, D] and keys [..., N, D]: [..., G, R, N].

    All have one dtype. The group is folded into the count of one product per KV head: broadcasting
    `queries @ keys.mT` would copy the keys G times (900 MiB at 65,536 tokens, 2 to 16 x slower).
    """
    group, count, _ = queries.shape[-3:]
    folded = queries.flatten(-3, -2)  # [..., G R, D]
    return torch.unflatten(folded @ keys.mT, -2, (group, count))


def recent_attention(queries: Tensor, keys: Tensor, window: int) -> Tensor:
    """Causal softmax attention, in float32, of the last `window` queries over all N keys.

    Queries [B, Q, W, D] of the last W tokens and keys [B, H, N, D], N >= W, after RoPE ->
    probabilities [B, H, G, min(window, W), N], scale 1/sqrt(D), query heads grouped by KV head.
    """
    batch, heads, tokens, width = keys.shape
    window = min(window, queries.shape[2])
    recent = queries[:, :, queries.shape[2] - window :].float() * width**-0.5
    grouped = recent.reshape(batch, heads, -1, window, width)  # [B, H, G, window, D]
    logits = group_products(grouped, keys.float())  # [B, H, G, window, N]
    newest = torch.arange(window, device=keys.device)
    unseen = newest > newest[:, None]  # of the last `window` keys: every query sees those before
    logits[..., tokens - window :].masked_fill_(unseen, -torch.inf)
    return logits.softmax(dim=-1)


@torch.no_grad()
def column_sums(queries: Tensor, keys: Tensor, block: int = 256) -> Tensor:
    """Accumulated attention sum_{j=0}^{N-1} softmax_i(q_gj . k_i / sqrt(D)) over i <= j.

    Queries [..., G, N, D] and keys [..., N, D] after RoPE -> [..., G, N] float32, sums to N over
    the tokens. Reductions over the G query heads differ between methods and are left to them.
    `block` queries at a time bound the memory. Raises ValueError where shapes disagree.
    """
    tokens, width = keys.shape[-2:]
    check_queries(queries, keys, 0, tokens, block)
    sums = torch.zeros(*queries.shape[:-1], dtype=torch.float32, device=keys.device)
    index = torch.arange(tokens, device=keys.device)
    for first in range(0, tokens, block):
        end = min(first + block, tokens)
        scaled = queries[..., first:end, :].float() * width**-0.5  # [..., G, count, D]
        logits = group_products(scaled, keys[..., :end, :].float())  # [..., G, count, end]
        logits.masked_fill_(index[:end] > index[first:end, None], -torch.inf)
        sums[..., :end] += logits.softmax(dim=-1).sum(dim=-2)  # [..., G, end]
    return sums


def check_queries(
    queries: Tensor, keys: Tensor, start: int, stop: int, block: int, weights: Tensor | None = None
) -> None:
    """Raise ValueError unless the queries start <= j < stop lie in the sequence.

    Queries are [..., G, T, D], keys [..., T, D], weights [T], `block` is at least 1.
    """
    tokens = keys.shape[-2] if keys.ndim > 1 else 0
    if queries.ndim != keys.ndim + 1 or queries.shape[:-3] + queries.shape[-2:] != keys.shape:
        raise ValueError(
            f"queries [..., G, T, D] and keys [..., T, D] disagree: "
            f"{tuple(queries.shape)} and {tuple(keys.shape)}"
        )
    if not 0 <= start <= stop <= tokens or block < 1:
        raise ValueError(f"no queries [{start}, {stop}) in blocks of {block} among {tokens}")
    if weights is not None and weights.shape != (tokens,):
        raise ValueError(
            f"weights of queries must be [T], here {tokens}, got {tuple(weights.shape)}"
        )


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
    """Signal s_i = max over g, j of u_j * w_gi * softmax_i(scaling * q_gj . k_i): [..., S] float32.

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
