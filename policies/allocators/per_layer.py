"""Counts per layer, the same in all its KV heads: what `pyramid`, `windowkv`, `evolved` share."""

import torch
from torch import Tensor

from kvp.allocation import Request, apportion


def apportion_layers(shares: Tensor, request: Request) -> Tensor:
    """[L, H] int64 in proportion to `shares` [L] float64: sum `request.total`, each floor to N."""
    layers, _, tokens = request.scores.shape
    counts = apportion(shares, layers * request.budget, minimum=request.floor, maximum=tokens)
    return repeat_in_heads(counts, request)


def repeat_in_heads(counts: Tensor, request: Request) -> Tensor:
    """The count of a layer in each of its heads: [L] int64 -> [L, H] int64."""
    return counts[:, None].expand(request.scores.shape[:2]).contiguous()


def linear_budgets(first: float, last: float, points: int) -> Tensor:
    """Equally spaced numbers from `first` to `last`: [points] float64; their mean for one point."""
    if points == 1:
        return torch.tensor([(first + last) / 2], dtype=torch.float64)
    steps = torch.arange(points, dtype=torch.float64)
    return first - steps * ((first - last) / (points - 1))
