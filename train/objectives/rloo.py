"""RLOO: rankings sampled by Gumbel sort, their rewards, REINFORCE (KVP paper, section 3.2, eq. 6).

Rewards, baselines and normalisation stay within one head. Left out: where contexts come from
(`train.contexts`) and the ranker (`policies.ranker`).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kvp.plackett_luce import gumbel_sort, log_prob
from kvp.reward import RATIO_FLOOR, mass_reward, ratio_reward, rloo_advantages, skill_reward
from train.objectives.batch import Batch, mean_of_counted
from train.presets import Recipe, RewardName

_REWARDS = {"skill": skill_reward, "ratio": ratio_reward, "mass": mass_reward}


def objective(batch: Batch, recipe: Recipe) -> tuple[Tensor, dict[str, float]]:
    """Policy-gradient loss of every head, [A] (see `train.objectives.batch`)."""
    rankings, rewards = [], []
    for scores, importance, seed in zip(batch.scores, batch.importances, batch.seeds, strict=True):
        noise = torch.Generator(scores.device).manual_seed(seed)
        rankings.append(gumbel_sort(scores.detach(), recipe.permutations, noise))
        rewards.append(rewards_of(recipe.reward, importance, rankings[-1]))
    reward = torch.stack(rewards)
    advantage = advantages(reward, batch.counted, recipe.advantage_clip)
    losses = policy_loss(batch.scores, rankings, advantage, batch.counted)
    metrics = {
        "train/reward": float(mean_of_counted(reward.mean(1), batch.counted)),
        "train/floor_share": floor_share(recipe.reward, reward),
    }
    return losses, metrics


def rewards_of(reward: RewardName, importance: Tensor, rankings: Tensor) -> Tensor:
    """Rewards of K rankings of one context: [A, N] importance, [K, A, N] int64 -> [K, A]."""
    return _REWARDS[reward](importance, rankings)


def advantages(rewards: Tensor, counted: Tensor, clip: float) -> Tensor:
    """Advantages of one step: leave-one-out within a context, normalised per head, clipped.

    Args:
        rewards: [C, K, A] rewards of K rankings in each of C contexts.
        counted: [C, A] bool, heads that learn from a context.
        clip: bound in standard deviations.

    Returns:
        [C, K, A] advantages with unit standard deviation per head over the contexts that count
        (before clipping); 0 where a head does not count.

    Raises:
        ValueError: K < 2.
    """
    raw = rloo_advantages(rewards.transpose(0, 1)).transpose(0, 1) * counted[:, None]
    episodes = counted.sum(0).clamp_min(1) * rewards.shape[1]
    deviation = (raw.square().sum((0, 1)) / episodes).sqrt()  # their mean is 0 in every context
    return (raw / deviation.clamp_min(1e-8)).clamp(-clip, clip)


def policy_loss(
    scores: Sequence[Tensor], rankings: Sequence[Tensor], advantages: Tensor, counted: Tensor
) -> Tensor:
    """Loss of every head: minus advantage times log-probability per token, mean over episodes.

    Args:
        scores: per context [A, N] float32, differentiable; N may differ between contexts.
        rankings: per context [K, A, N] int64.
        advantages: [C, K, A].
        counted: [C, A] bool; the mean over contexts runs over those a head learns from.

    Returns:
        [A] losses; their sum over heads is what is minimised.
    """
    total = torch.zeros_like(scores[0][:, 0])
    for context, ranking, advantage in zip(scores, rankings, advantages, strict=True):
        total = total - (advantage * log_prob(context, ranking)).mean(0) / context.shape[-1]
    return total / counted.sum(0).clamp_min(1)


def floor_share(reward: RewardName, rewards: Tensor) -> float:
    """Share of `ratio` rewards that sit on their floor; 0 for the other rewards."""
    return float((rewards <= RATIO_FLOOR).float().mean()) if reward == "ratio" else 0.0
