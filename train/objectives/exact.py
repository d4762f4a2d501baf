"""The expected reward in closed form, which RLOO estimates from sampled rankings.

Under Plackett-Luce the mean all-budgets cost is sum_i w_i sum_{j != i} sigmoid(s_j - s_i)
(`kvp.expected_cost`); the loss is minus the reward of that mean cost. It is a pairwise logistic
ranking loss, weighted by future attention. Rewards are linear in the cost, so this is minus the
mean reward (`ratio` without its floor).
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvp.expected_cost import expected_cost
from kvp.reward import ratio_of_cost, skill_of_cost
from train.objectives.objective_batch import Batch, mean_of_counted
from train.recipe import Recipe

_REWARDS = {"skill": skill_of_cost, "ratio": ratio_of_cost}
_TILE = 2**22
"""Pairs handled at a time: 16 MB of float32."""


def objective(batch: Batch, recipe: Recipe) -> tuple[Tensor, dict[str, float]]:
    """Minus the expected reward, mean of the contexts that count, [A]
    (`train.objectives.objective_batch`).
    """
    rewards = []
    for scores, importance in zip(batch.scores, batch.importances, strict=True):
        block = max(_TILE // scores.numel(), 16)
        cost = expected_cost(importance, scores, block)  # [A]
        rewards.append(_REWARDS[recipe.reward](importance, cost))
    reward = torch.stack(rewards)  # [C, A]
    metrics = {"train/reward": float(mean_of_counted(reward.detach(), batch.counted))}
    return -batch.mean(reward), metrics
