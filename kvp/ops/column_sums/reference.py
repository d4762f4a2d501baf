"""Column sums of the causal attention matrix, per query head, in plain PyTorch."""

from __future__ import annotations

import torch
from torch import Tensor

from kvp.ops.attention_rows import attention_rows


@torch.no_grad()
def column_sums(queries: Tensor, keys: Tensor, block: int = 256) -> Tensor:
    """Accumulated attention sum_{j=0}^{N-1} softmax_i(q_gj . k_i / sqrt(D)), causal.

    Reductions over the query heads of a group differ between methods and are left to them.

    Args:
        queries: [..., G, N, D] float after RoPE.
        keys: [..., N, D] float after RoPE.
        block: queries handled at a time; bounds memory at [..., G, block, N] float32.

    Returns:
        [..., G, N] float32; sums to N over the tokens.

    Raises:
        ValueError: shapes disagree.
    """
    tokens = keys.shape[-2]
    sums = torch.zeros(*queries.shape[:-1], dtype=torch.float32, device=keys.device)
    for rows in attention_rows(queries, keys, 0, tokens, block):
        sums[..., : rows.shape[-1]] += rows.sum(dim=-2)
    return sums
