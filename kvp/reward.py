"""What a ranking is worth: the attention it loses over *all* budgets (KVP paper, section 3.1.1).

Importance w is the future attention of every token (`kvp.ops.future_attention`). A cache of budget
b keeps the first b tokens of a ranking σ and loses E_b = sum_{r>b} w_{σ_r} (equation 5). The token
at rank r is evicted by exactly the budgets 1..r-1, so the sum over all budgets (equation 4) needs
no loop: sum_{b=1}^{N-1} E_b = sum_r (r-1) w_{σ_r}. Costs are positive, lower is better; rewards are
higher = better (the paper's quotient of two negative rewards would have to be minimised).

Tokens are the last axis; leading axes of `ranking` (samples, heads) broadcast over `importance`.
Left out: which tokens take part (callers drop protected ones) and the optimiser.
"""

from __future__ import annotations

import torch
from torch import Tensor

RATIO_FLOOR = -200.0
"""Smallest `ratio_reward`."""


def all_budgets_cost(importance: Tensor, ranking: Tensor) -> Tensor:
    """Importance lost, summed over the budgets 1..N-1: sum_r (r-1) w_{σ_r}  (equation 4).

    Args:
        importance: [..., N] float32 or float64, >= 0.
        ranking: [..., N] int64 token indices, most important first.

    Returns:
        [...] costs in the importance's dtype.

    Raises:
        TypeError: a dtype is wrong.
        ValueError: the token axes differ.
    """
    ranked = _ranked(importance, ranking)
    return ranked @ _coefficients(ranked)


def ideal_cost(importance: Tensor) -> Tensor:
    """Cost of the best ranking σ*, by descending importance: [..., N] -> [...]."""
    _check(importance)
    return importance.sort(dim=-1, descending=True).values @ _coefficients(importance)


def random_cost(importance: Tensor) -> Tensor:
    """Mean cost of a uniformly random ranking, W (N-1) / 2: [..., N] -> [...]."""
    _check(importance)
    return importance.sum(-1) * ((importance.shape[-1] - 1) / 2)


def skill_reward(importance: Tensor, ranking: Tensor) -> Tensor:
    """(random - cost) / (random - ideal): 1 is perfect, 0 as good as chance; ours, bounded above.

    Where all tokens matter alike there is nothing to learn, and every ranking gets 0.
    Shapes and errors as `all_budgets_cost`.
    """
    chance = random_cost(importance)
    span = chance - ideal_cost(importance)
    flat = span <= 1e-6 * chance
    gain = chance - all_budgets_cost(importance, ranking)
    return torch.where(flat, 0.0, gain / torch.where(flat, 1.0, span))


def ratio_reward(importance: Tensor, ranking: Tensor) -> Tensor:
    """Minus cost / ideal cost (the paper's normalisation), with coefficients r, at least -200.

    The coefficients are r instead of r-1, that is, budget 0 counts too: both costs grow by W, which
    keeps the quotient bounded where one token holds all the attention.
    Shapes and errors as `all_budgets_cost`.
    """
    total = importance.sum(-1)
    cost = all_budgets_cost(importance, ranking) + total
    return -(cost / (ideal_cost(importance) + total).clamp_min(1e-8)).clamp(max=-RATIO_FLOOR)


def mass_reward(importance: Tensor, ranking: Tensor) -> Tensor:
    """Minus cost / (W N): minus the mean fraction of attention lost. As `all_budgets_cost`."""
    mass = importance.sum(-1) * importance.shape[-1]
    return -all_budgets_cost(importance, ranking) / mass.clamp_min(torch.finfo(mass.dtype).tiny)


def rloo_advantages(rewards: Tensor) -> Tensor:
    """Reward minus the mean reward of the other K-1 rankings of the same context (equation 6).

    Args:
        rewards: [K, ...] float, K >= 2 rankings per context.

    Returns:
        [K, ...] advantages; they sum to zero over K.

    Raises:
        TypeError: the rewards are not floating point.
        ValueError: K < 2, so there are no others.
    """
    _check(rewards)
    samples = rewards.shape[0]
    if samples < 2:
        raise ValueError(f"leave-one-out needs at least 2 rankings per context, got {samples}")
    return (rewards - rewards.mean(0)) * (samples / (samples - 1))


def cost_curve(importance: Tensor, ranking: Tensor) -> Tensor:
    """Importance lost at every budget, E_b for b = 0..N (equation 5): -> [..., N + 1].

    E_0 = W and E_N = 0. Arguments and errors as `all_budgets_cost`.
    """
    lost = _ranked(importance, ranking).flip(-1).cumsum(-1).flip(-1)
    return torch.nn.functional.pad(lost, (0, 1))


def expected_cost(importance: Tensor, scores: Tensor, block: int = 256) -> Tensor:
    """Exact mean of `all_budgets_cost` under Plackett-Luce scores; no sampling, differentiable.

    Token j precedes i with probability sigmoid(s_j - s_i), and the cost is linear in ranks, so the
    mean is sum_i w_i sum_{j != i} sigmoid(s_j - s_i). O(N^2) time, `block` x N memory at a time.

    Args:
        importance: [..., N] float32 or float64, >= 0.
        scores: [..., N], same shape and dtype as the importance.
        block: tokens i handled at a time.

    Returns:
        [...] mean costs.

    Raises:
        TypeError: a dtype is wrong.
        ValueError: the shapes differ.
    """
    _check(importance)
    if scores.shape != importance.shape or scores.dtype != importance.dtype:
        raise ValueError("scores and importance must agree in shape and dtype")
    total = -0.5 * importance.sum(-1)  # the loop below counts j = i, with sigmoid(0)
    for start in range(0, scores.shape[-1], block):
        rows = slice(start, start + block)
        before = (scores[..., None, :] - scores[..., rows, None]).sigmoid().sum(-1)
        total = total + (importance[..., rows] * before).sum(-1)
    return total


def _check(values: Tensor) -> None:
    if values.dtype not in (torch.float32, torch.float64):
        raise TypeError(f"expected float32 or float64, got {values.dtype}")
    if values.ndim < 1:
        raise ValueError("expected at least one axis")


def _ranked(importance: Tensor, ranking: Tensor) -> Tensor:
    _check(importance)
    if ranking.dtype != torch.int64:
        raise TypeError(f"a ranking holds int64 token indices, got {ranking.dtype}")
    if ranking.shape[-1] != importance.shape[-1]:
        raise ValueError(f"{ranking.shape[-1]} ranked tokens for {importance.shape[-1]}")
    return importance.expand(ranking.shape).gather(-1, ranking)


def _coefficients(values: Tensor) -> Tensor:
    """Rank minus one, for the ranks r = 1..N."""
    return torch.arange(values.shape[-1], dtype=values.dtype, device=values.device)
