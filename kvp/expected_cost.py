"""The mean all-budgets cost of a Plackett-Luce policy in closed form: no sampled rankings.

Token j precedes i with probability sigmoid(s_j - s_i), and the cost (`kvp.reward`) is linear in
ranks, so its mean is sum_i w_i sum_{j != i} sigmoid(s_j - s_i). The paper does not use this; RLOO
(its equation 6) is an unbiased estimate of the gradient of exactly this function.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def expected_cost(importance: Tensor, scores: Tensor, block: int = 256) -> Tensor:
    """Exact mean of `all_budgets_cost` under Plackett-Luce scores, differentiable once.

    O(N^2) time; the gradient is accumulated in the same pass, so that memory stays at two tiles of
    `block` x N whatever N is (also for the backward pass).

    Args:
        importance: [..., N] float32 or float64, >= 0. Not differentiated.
        scores: [..., N], same shape and dtype as the importance.
        block: tokens handled at a time.

    Returns:
        [...] mean costs.

    Raises:
        TypeError: a dtype is wrong.
        ValueError: the shapes differ.
    """
    _check(importance, scores)
    cost: Tensor = _ExpectedCost.apply(importance, scores, block)  # type: ignore[no-untyped-call]
    return cost


class _ExpectedCost(torch.autograd.Function):
    """Cost and gradient from one pass over the tiles on and above the diagonal.

    With p = sigmoid(s_j - s_i) for a pair: it adds w_i p + w_j (1 - p) to the cost, and
    (w_i - w_j) p (1 - p) to the gradient of s_j and the opposite to that of s_i.
    """

    @staticmethod
    def forward(ctx: Any, importance: Tensor, scores: Tensor, block: int) -> Tensor:  # noqa: ANN401
        cost = -0.5 * importance.sum(-1)  # the diagonal tiles below count j = i, with sigmoid(0)
        gradient = torch.zeros_like(scores)
        for start in range(0, scores.shape[-1], block):
            tile, rest = slice(start, start + block), slice(start + block, None)
            score, weight = scores[..., tile], importance[..., tile]
            inside = (score[..., None, :] - score[..., :, None]).sigmoid_()
            cost = cost + (weight * inside.sum(-1)).sum(-1)
            slope = inside.mul_(1 - inside)
            gradient[..., tile] += _times(weight, slope) - weight * slope.sum(-2)
            later, later_weight = scores[..., rest], importance[..., rest]
            before = (later[..., None, :] - score[..., :, None]).sigmoid_()
            cost = cost + (weight * before.sum(-1)).sum(-1)
            cost = cost + (later_weight * (score.shape[-1] - before.sum(-2))).sum(-1)
            slope = before.mul_(1 - before)
            gradient[..., rest] += _times(weight, slope) - later_weight * slope.sum(-2)
            gradient[..., tile] += _times(later_weight, slope.mT) - weight * slope.sum(-1)
        ctx.save_for_backward(gradient)
        return cost

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[None, Tensor, None]:  # noqa: ANN401
        (gradient,) = ctx.saved_tensors
        return None, upstream[..., None] * gradient, None


def _times(vector: Tensor, matrix: Tensor) -> Tensor:
    """[..., R] times [..., R, C] -> [..., C]."""
    return (vector[..., None, :] @ matrix).squeeze(-2)


def _check(importance: Tensor, scores: Tensor) -> None:
    if importance.dtype not in (torch.float32, torch.float64):
        raise TypeError(f"expected float32 or float64, got {importance.dtype}")
    if scores.shape != importance.shape or scores.dtype != importance.dtype:
        raise ValueError("scores and importance must agree in shape and dtype")
