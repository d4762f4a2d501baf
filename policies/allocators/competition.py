"""Heads that compete for tokens by score: the selection that `ada` and `global` share.

Ties are decided as everywhere (`kvp.ranking`): the newer token wins; then the lower layer, then the
lower head.
"""

from __future__ import annotations

import torch
from torch import Tensor


def winners(scores: Tensor, total: int, *, guaranteed: int) -> Tensor:
    """How many of the best `total` tokens each head has.

    Args:
        scores: [R, U, N] higher = keep, without NaN: in each of R rows, U heads that compete.
        total: tokens to keep per row, U * guaranteed <= total <= U * N.
        guaranteed: tokens of every head that are kept before heads compete.

    Returns:
        [R, U] int64, guaranteed <= count <= N, sum `total` over U. Time and memory O(R U N).
    """
    rows, heads, tokens = scores.shape
    newest_first = scores.flip(-1)
    safe = best(newest_first, guaranteed)
    open_to_all = newest_first.masked_fill(safe, -torch.inf).mT.reshape(rows, tokens * heads)
    # A safe token must not be counted twice, so it also loses every tie at -inf.
    taken = best(open_to_all, total - heads * guaranteed, allowed=~safe.mT.reshape(rows, -1))
    return guaranteed + taken.view(rows, tokens, heads).sum(dim=1)


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
