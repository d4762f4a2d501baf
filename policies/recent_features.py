"""What the last queries attend to, as features of a token: input `recent` of a ranker.

For the last 1, 4, 16 and 32 queries: mean attention over queries and the heads of the group, of the
token and as the largest of the 7, 31 and 63 tokens around it (SnapKV's pooling over positions); for
32 the largest attention, too. All are logarithms of multiples of the uniform share 1 / N, so that
lengths compare, and at least -7. Last comes whether the token is one of the 32.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from policies.recent_attention import recent_attention

RECENT_QUERIES = 32
"""Queries that are read; fewer where fewer tokens have been seen."""
_WINDOWS = (1, 4, 16, RECENT_QUERIES)
_KERNELS = (7, 31, 63)
_FLOOR = 1e-3
RECENT_FEATURES = (
    *(f"log mean attention of {w} queries{p}" for w in _WINDOWS
      for p in ("", *(f", largest of {k} tokens" for k in _KERNELS))),
    f"log largest attention of {RECENT_QUERIES} queries",
    f"one of the last {RECENT_QUERIES} tokens",
)  # fmt: skip
"""The columns, in order."""


def recent_features(queries: Tensor, keys: Tensor) -> Tensor:
    """Features of every token: float32 [B, H, N, len(RECENT_FEATURES)].

    `queries` [B, Q, W, D] are those of the last W tokens (more than `RECENT_QUERIES` are not read),
    `keys` [B, H, N, D] of all of them; both after RoPE.
    """
    tokens = keys.shape[2]
    window = min(RECENT_QUERIES, queries.shape[2], tokens)
    attention = recent_attention(queries, keys, window)  # [B, H, G, window, N]
    of_queries = attention.mean(dim=2)  # [B, H, window, N]
    shares = []
    for size in _WINDOWS:
        mean = of_queries[..., -min(size, window) :, :].mean(dim=2)  # [B, H, N]
        shares += [mean, *(F.max_pool1d(mean, k, stride=1, padding=k // 2) for k in _KERNELS)]
    shares.append(attention.amax(dim=(2, 3)))
    logs = (torch.stack(shares, dim=-1) * tokens).clamp_min(_FLOOR).log()
    newest = torch.arange(tokens, device=keys.device) >= tokens - window  # [N]
    return torch.cat([logs, newest.expand(logs.shape[:3])[..., None].float()], dim=-1)
