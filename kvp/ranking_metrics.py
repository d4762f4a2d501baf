"""Metrics of rankings, defined once for all programs.

A cache holds N tokens of importance w (future attention, `kvp.ops.future_attention`), W = sum w.
Protected tokens come first in every ranking; p of them leave N - p that compete. E_b is the
importance of the tokens that a budget of b tokens evicts (KVP paper, equation 5).

    attention lost    E_b / W
    skill             (chance - cost) / (chance - ideal), cost = sum over b = p + 1 .. N - 1 of E_b

Chance and ideal are the mean and the least cost of all rankings *with the same protected tokens*:
a random ranking has skill 0 on average, the ideal one 1, with protection and without. Budgets up to
p keep protected tokens only and say nothing about a ranking.

Methods that look at the budget rank tokens anew for the budgets of `grid_budgets`; each of their
rankings serves the budgets above the one before it, up to its own.
"""

from collections.abc import Iterable

import torch
from torch import Tensor

from kvp.protection import UNPROTECTED, Protection
from kvp.ranking import rank_tokens
from kvp.reward import cost_curve, ideal_cost, random_cost, skill_reward

NO_SIGNAL = 1e-3
"""A head has no signal where the ideal ranking costs less than this share below a random one: all
tokens are equally important, and every ranking is as good as any other."""

_GRID = (1, 1.5, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
"""Budgets of `grid_budgets` in 64ths of the cache; each at most 1.5 times the one before."""


def grid_budgets(tokens: int) -> list[int]:
    """Budgets for which methods that look at them rank `tokens`, ascending; the last is all."""
    return sorted({max(1, round(part * tokens / 64)) for part in _GRID})


def lost_importance(
    importance: Tensor, scored: Iterable[tuple[Tensor, int]], protection: Protection
) -> Tensor:
    """Importance lost at every budget, E_b for b = 0..N: [..., N] -> [..., N + 1] float64.

    `scored` has scores [..., N] and the largest budget they serve, ascending; the last serves N.
    """
    importance = importance.double()
    tokens = importance.shape[-1]
    lost = importance.new_zeros(*importance.shape[:-1], tokens + 1)
    start = 0
    before: Tensor | None = None
    curve = lost
    for scores, last in scored:
        if before is None or not torch.equal(before, scores):
            ranking = rank_tokens(scores.to(importance.device), protection)
            curve = cost_curve(importance, ranking)  # [..., N + 1]
        lost[..., start : last + 1] = curve[..., start : last + 1]
        before, start = scores, last + 1
    return lost


def attention_lost(lost: Tensor) -> Tensor:
    """E_b / W of E_b [..., N + 1]: the share of attention lost, 0 where there is none to lose."""
    return lost / lost[..., :1].clamp_min(torch.finfo(lost.dtype).tiny)


def skill(importance: Tensor, lost: Tensor, protection: Protection = UNPROTECTED) -> Tensor:
    """(chance - cost) / (chance - ideal) of rankings with these tokens protected.

    Importance [..., N] >= 0 and E_b of the ranking, [..., N + 1] float64 -> [...] float64, <= 1;
    NaN for heads without signal (`has_signal`).
    """
    tokens = importance.shape[-1]
    competing = importance[..., protection.competing(tokens)].double()  # [..., N - p]
    if competing.shape[-1] < 2:
        return importance.new_full(importance.shape[:-1], torch.nan, dtype=torch.float64)
    protected = tokens - competing.shape[-1]
    cost = lost[..., protected + 1 : tokens].sum(-1)
    return skill_reward(competing, cost).where(has_signal(competing), torch.nan)


def has_signal(importance: Tensor) -> Tensor:
    """Heads whose competing tokens differ in importance: [..., N] -> [...] bool."""
    chance = random_cost(importance)
    return chance - ideal_cost(importance) > NO_SIGNAL * chance
