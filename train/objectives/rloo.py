"""RLOO: rankings sampled by Gumbel sort, their rewards, REINFORCE (KVP paper, section 3.2, eq. 6).

Two estimators of one gradient, which differ in their baseline, the mean reward of other rankings:
`objective` takes the other rankings of the same context (the paper's Algorithm 1),
`batch_objective` all other rankings of the step, whatever their context (the text under equation 6,
and the released code with one ranking of each of many contexts).

Rewards, baselines and normalisation stay within one head. Left out: where contexts come from
(`train.data.contexts`) and the ranker (`policies.ranker`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from kvp.plackett_luce import gumbel_sort, log_prob
from kvp.reward import RATIO_FLOOR, ratio_reward, rloo_advantages, skill_reward
from train.objectives.objective_batch import Batch, mean_of_counted
from train.recipe import Recipe, RewardName

_REWARDS = {"skill": skill_reward, "ratio": ratio_reward}

Baseline = Callable[[Tensor, Batch], Tensor]
"""Rewards [C, K, A] of a batch -> rewards minus their baselines, 0 where a head does not count."""


def objective(batch: Batch, recipe: Recipe) -> tuple[Tensor, dict[str, float]]:
    """Policy-gradient loss of every head, [A], baselines within a context."""
    return _objective(batch, recipe, within_context)


def batch_objective(batch: Batch, recipe: Recipe) -> tuple[Tensor, dict[str, float]]:
    """Policy-gradient loss of every head, [A], baselines over the whole step."""
    return _objective(batch, recipe, within_step)


def _objective(batch: Batch, recipe: Recipe, baseline: Baseline) -> tuple[Tensor, dict[str, float]]:
    rankings = [sampled(batch, context, recipe.permutations) for context in range(len(batch.seeds))]
    rewards = torch.stack(
        [
            _REWARDS[recipe.reward](importance, ranking)
            for importance, ranking in zip(batch.importances, rankings, strict=True)
        ]
    )
    advantage = normalised(baseline(rewards, batch), batch, recipe.advantage_clip)  # [C, K, A]
    metrics = {
        "train/reward": float(mean_of_counted(rewards.mean(1), batch.counted)),
        "train/floor_share": floor_share(recipe.reward, rewards, batch.counted),
    }
    return policy_loss(batch, rankings, advantage), metrics


def sampled(batch: Batch, context: int, permutations: int) -> Tensor:
    """Draw K rankings of one context from its seed: [K, A, N] int64."""
    scores = batch.scores[context].detach()  # [A, N]
    noise = torch.Generator(scores.device).manual_seed(batch.seeds[context])
    return gumbel_sort(scores, permutations, noise, shard=batch.heads, of=batch.model_heads)


def within_context(rewards: Tensor, batch: Batch) -> Tensor:
    """Reward minus the mean of the other K-1 rankings of its context; ValueError if K < 2."""
    return rloo_advantages(rewards.transpose(0, 1)).transpose(0, 1) * batch.counted[:, None]


def within_step(rewards: Tensor, batch: Batch) -> Tensor:
    """Reward minus the mean of all other rankings of the step that count; 0 for a single one."""
    counted = batch.counted[:, None]  # [C, 1, A]
    episodes = batch.across(batch.counted.sum(0)) * rewards.shape[1]  # [A]
    mean = batch.across((rewards * counted).sum((0, 1))) / episodes.clamp_min(1)  # [A]
    return (rewards - mean) * counted * (episodes / (episodes - 1).clamp_min(1))


def normalised(raw: Tensor, batch: Batch, clip: float) -> Tensor:
    """Advantages with unit standard deviation per head over the contexts that count, then clipped.

    Args:
        raw: [C, K, A] rewards minus baselines; their mean is 0 for every head.
        batch: says which contexts count.
        clip: bound in standard deviations.
    """
    episodes = batch.across(batch.counted.sum(0)).clamp_min(1) * raw.shape[1]
    deviation = (batch.across(raw.square().sum((0, 1))) / episodes).sqrt()  # [A]
    return (raw / deviation.clamp_min(1e-8)).clamp(-clip, clip)


def policy_loss(batch: Batch, rankings: Sequence[Tensor], advantages: Tensor) -> Tensor:
    """Loss of every head: minus advantage times log-probability per token, mean over episodes.

    Args:
        batch: scores, per context [A, N] float32, and the contexts that count.
        rankings: per context [K, A, N] int64.
        advantages: [C, K, A].

    Returns:
        [A] losses; their sum over heads is what is minimised.
    """
    losses = [
        -(advantage * log_prob(scores, ranking)).mean(0) / scores.shape[-1]
        for scores, ranking, advantage in zip(batch.scores, rankings, advantages, strict=True)
    ]
    return batch.mean(torch.stack(losses))


def floor_share(reward: RewardName, rewards: Tensor, counted: Tensor) -> float:
    """Share of `ratio` rewards [C, K, A] of heads that count [C, A] that sit on their floor.

    0 for the other rewards, which have no floor.
    """
    if reward != "ratio":
        return 0.0
    return float(mean_of_counted((rewards <= RATIO_FLOOR).float().mean(1), counted))
