"""Heads that compete for tokens by score: the selection that `ada` and `global` share.

Ties are decided as everywhere (`kvp.ranking`): the newer token wins; then the lower layer, then the
lower head.
"""

from __future__ import annotations

import torch
from torch import Tensor


def winners(scores: Tensor, total: int, *, guaranteed: int) -> Tensor:
    """Tokens of every head among the best `total` tokens of all heads that compete.

    Args:
        scores: [C, U, N] higher = keep, without NaN: C separate competitions of U heads each.
        total: tokens to keep per competition, U * guaranteed <= total <= U * N.
        guaranteed: tokens of every head that are kept before heads compete.

    Returns:
        [C, U] int64, guaranteed <= count <= N, sum `total` over U. Time and memory O(C U N).
    """
    competitions, heads, tokens = scores.shape
    newest_first = scores.flip(-1)
    safe = best(newest_first, guaranteed)
    open_to_all = newest_first.masked_fill(safe, -torch.inf).mT.reshape(
        competitions, tokens * heads
    )
    # A safe token must not be counted twice, so it also loses every tie at -inf.
    taken = best(
        open_to_all, total - heads * guaranteed, allowed=~safe.mT.reshape(competitions, -1)
    )
    return guaranteed + taken.view(competitions, tokens, heads).sum(dim=1)


def best(scores: Tensor, count: int, *, allowed: Tensor | None = None) -> Tensor:
    """Mark the `count` largest along the last axis, ties to the first: [..., M] -> [..., M] bool.

    Entries that are not `allowed` ([..., M] bool) must be -inf and are never marked.
    """
    if count == 0:
        return torch.zeros_like(scores, dtype=torch.bool)
    limit = scores.kthvalue(scores.shape[-1] - count + 1, dim=-1, keepdim=True).values
    above, ties = scores > limit, scores == limit
    if allowed is not None:
        ties &= allowed
    missing = count - above.sum(dim=-1, keepdim=True)
    return above | (ties & (ties.cumsum(dim=-1) <= missing))
