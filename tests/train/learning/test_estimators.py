"""Sampled gradients estimate the exact one.

Heads are independent agents, so copies of one head are independent samples of its estimate.
"""

from dataclasses import replace

import pytest
import torch

from kvp.reward import ratio_reward, reward_rankings, skill_reward
from train.learning.losses import (
    Batch,
    load_objective,
    normalise,
    policy_loss,
    sample_rankings,
    within_context,
    within_step,
)
from train.recipe import PRESETS

REWARDS = {"skill": skill_reward, "ratio": ratio_reward}
COPIES = 4_000


def contexts():
    """An easy context, whose scores are right, and two hard ones: scores and importance [1, N]."""
    random = torch.Generator().manual_seed(0)
    importances = [torch.rand(1, n, generator=random) ** 4 for n in (10, 14, 8)]
    noise = [torch.randn(w.shape, generator=random) for w in importances]
    return [3 * importances[0].log() / 4, *noise[1:]], importances


def copy_heads(copies, *, seeds=range(3)):
    """The contexts, each with `copies` identical heads."""
    scores, importances = contexts()
    return Batch(
        scores=[score.expand(copies, -1).clone().requires_grad_() for score in scores],
        importances=[importance.expand(copies, -1) for importance in importances],
        counted=torch.ones(3, copies, dtype=torch.bool),
        seeds=seeds,
    )


def exact_rewards_and_gradients(reward):
    """Mean reward of every context and the gradient of the mean over contexts, by the closed form
    with a plain double sum, per token as `policy_loss` counts."""
    scores, importances = contexts()
    means, gradients = [], []
    for score, importance in zip(scores, importances, strict=True):
        score = score.clone().requires_grad_()
        before = (score[:, None, :] - score[:, :, None]).sigmoid()  # [1, i, j]
        off = 1 - torch.eye(score.shape[-1])
        mean = REWARDS[reward](importance, (importance[..., None] * before * off).sum((-2, -1)))
        means.append(mean.detach())
        gradients.append(torch.autograd.grad(mean.sum(), score)[0][0] / 3 / score.shape[-1])
    return means, gradients


def assert_mean_near(samples, expected, errors=4.5):
    """Mean of [samples, ...] within some standard errors of the truth, element by element."""
    error = samples.std(0) / len(samples) ** 0.5
    far = ((samples.mean(0) - expected).abs() / error.clamp_min(1e-12)).max()
    assert far < errors


@pytest.mark.parametrize("reward", ["skill", "ratio"])
@pytest.mark.parametrize(
    ("baseline", "permutations"), [(within_context, 2), (within_step, 1), (within_step, 2)]
)
def test_policy_gradients_estimate_the_exact_one(reward, baseline, permutations):
    batch = copy_heads(COPIES)
    rankings = [sample_rankings(batch, context, permutations) for context in range(3)]
    pairs = zip(batch.importances, rankings, strict=True)
    rewards = torch.stack([reward_rankings(REWARDS[reward], *pair) for pair in pairs])
    means, expected = exact_rewards_and_gradients(reward)
    for context in range(3):
        assert_mean_near(rewards[context].mean(0), means[context])
    loss = policy_loss(batch, rankings, baseline(rewards, batch))
    gradients = torch.autograd.grad(loss.sum(), batch.scores)
    for gradient, truth in zip(gradients, expected, strict=True):
        assert_mean_near(-gradient, truth)  # the loss is minus the reward


def test_step_baselines_by_hand():
    # Rewards 1, 2 | 6, 7 count for the first head, 1, 2 for the second, 6 for nobody else.
    rewards = torch.tensor([[[1.0, 1.0], [2.0, 2.0]], [[6.0, 6.0], [7.0, 7.0]]])
    batch = replace(
        copy_heads(2),
        scores=[torch.zeros(2, 3)] * 2,
        counted=torch.tensor([[True, True], [True, False]]),
    )
    expected = torch.tensor(
        [[[1 - 5.0, -1.0], [2 - 14 / 3, 1.0]], [[6 - 10 / 3, 0.0], [7 - 3.0, 0.0]]]
    )
    torch.testing.assert_close(within_step(rewards, batch), expected)


def test_a_lone_episode_has_nobody_to_compare_with():
    batch = replace(copy_heads(1), counted=torch.tensor([[False], [True], [False]]))
    assert torch.equal(within_step(torch.randn(3, 1, 1), batch), torch.zeros(3, 1, 1))
    advantages = normalise(torch.zeros(3, 1, 1), batch, 3.0)
    assert torch.equal(advantages, torch.zeros(3, 1, 1))


@pytest.mark.parametrize("reward", ["skill", "ratio"])
def test_exact_loss_is_minus_the_mean_reward(reward):
    batch = copy_heads(1)
    recipe = replace(PRESETS["fourier"], objective="exact", reward=reward)
    losses, metrics = load_objective("exact")(batch, recipe)
    means, expected = exact_rewards_and_gradients(reward)
    torch.testing.assert_close(-losses, torch.stack(means).mean(0))
    assert metrics["train/reward"] == pytest.approx(-losses.item())
    gradients = torch.autograd.grad(losses.sum(), batch.scores)
    for gradient, truth in zip(gradients, expected, strict=True):
        torch.testing.assert_close(-gradient[0] / gradient.shape[-1], truth)
