"""The RLOO objective of one optimiser step, as pure functions (KVP paper, section 3.2, equation 6).

Every head is an agent of its own: rewards, baselines and normalisation never mix heads, and losses
are summed over heads, so that what "gradient norm 5" means does not depend on how many heads train
together. Left out: where contexts come from (`train.contexts`) and the ranker (`policies.ranker`).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kvp.plackett_luce import log_prob
from kvp.reward import (
    RATIO_FLOOR,
    ideal_cost,
    mass_reward,
    random_cost,
    ratio_reward,
    rloo_advantages,
    skill_reward,
)
from train.presets import RewardName

FLAT = 1e-3
"""A head has something to learn in a context when the ideal ranking beats a random one by this
fraction of the random cost."""

_REWARDS = {"skill": skill_reward, "ratio": ratio_reward, "mass": mass_reward}


def rewards_of(reward: RewardName, importance: Tensor, rankings: Tensor) -> Tensor:
    """Rewards of K rankings of one context: [A, N] importance, [K, A, N] int64 -> [K, A]."""
    return _REWARDS[reward](importance, rankings)


def learnable(importance: Tensor) -> Tensor:
    """Heads whose future attention is not flat: [A, N] -> [A] bool."""
    chance = random_cost(importance)
    return chance - ideal_cost(importance) > FLAT * chance


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


def top_entropy(scores: Tensor) -> Tensor:
    """Entropy of the first pick over that of a uniform pick: [A, N] -> [A], in [0, 1]."""
    log_share = scores.log_softmax(-1)
    entropy = -(log_share.exp() * log_share).sum(-1)
    return entropy / torch.tensor(float(scores.shape[-1])).log()


def floor_share(reward: RewardName, rewards: Tensor) -> float:
    """Share of `ratio` rewards that sit on their floor; 0 for the other rewards."""
    return float((rewards <= RATIO_FLOOR).float().mean()) if reward == "ratio" else 0.0
