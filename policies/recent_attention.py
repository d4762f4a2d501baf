"""Attention of the most recent queries over the whole cache, for methods with a window.

Column sums over all queries are `kvp.ops.streaming_softmax.column_sums`; attention of the future is
`kvp.ops.future_attention`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvp.ops.group_products import group_products

FORCED = 2.0
"""Score above every attention probability: tokens a method always keeps, newest first."""


def recent_attention(queries: Tensor, keys: Tensor, window: int) -> Tensor:
    """Causal softmax attention, in float32, of the last `window` queries over all N keys.

    Args:
        queries: [B, Q, W, D] after RoPE of the last W tokens.
        keys: [B, H, N, D] after RoPE, N >= W.
        window: queries to use; W where there are fewer.

    Returns:
        [B, H, G, window, N] probabilities, scale 1/sqrt(D); query heads grouped by KV head.
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
