"""Losses and advantages against numbers worked out by hand."""

import math
from dataclasses import replace

import pytest
import torch

from kvp.reward import log_prob
from train.learning.losses import (
    FLOOR,
    Batch,
    cross_entropy,
    load_objective,
    normalise,
    policy_loss,
    squared_error,
    within_context,
)
from train.recipe import PRESETS


def batch_with(*parts, counted):
    return Batch(
        scores=[scores for scores, _ in parts],
        importances=[importance for _, importance in parts],
        counted=torch.tensor(counted),
        seeds=[7] * len(parts),
    )


def advantages(rewards, counted, clip):
    batch = batch_with(*[(rewards[0], rewards[0])] * len(rewards), counted=counted)
    return normalise(within_context(rewards, batch), batch, clip)


def test_loss_by_hand():
    scores = [torch.tensor([[0.3, -0.2]]), torch.tensor([[0.0, 1.0, 2.0]])]
    rankings = [torch.tensor([[[0, 1]], [[1, 0]]]), torch.tensor([[[2, 1, 0]], [[0, 1, 2]]])]
    advantage = torch.tensor([[[1.0], [-1.0]], [[0.5], [-0.5]]])
    batch = batch_with(*zip(scores, scores, strict=True), counted=[[True], [True]])
    first = log_prob(scores[0], rankings[0][0]) - log_prob(scores[0], rankings[0][1])
    second = log_prob(scores[1], rankings[1][0]) - log_prob(scores[1], rankings[1][1])
    # mean over 2 permutations, per token, mean over 2 contexts
    expected = -(first / 2 / 2 + 0.5 * second / 2 / 3) / 2
    torch.testing.assert_close(policy_loss(batch, rankings, advantage), expected)


def test_advantages_by_hand():
    # Leave-one-out of (1, 2, 3) is (-1.5, 0, 1.5): deviation sqrt(1.5); the second context is flat.
    rewards = torch.tensor([[[1.0], [2.0], [3.0]], [[7.0], [8.0], [90.0]]])
    counted = [[True], [False]]
    result = advantages(rewards, counted, clip=9.0)
    edge = 1.5**0.5
    expected = torch.tensor([[[-edge], [0.0], [edge]], [[0.0], [0.0], [0.0]]])
    torch.testing.assert_close(result, expected)
    assert advantages(rewards, counted, clip=0.5).abs().max() == 0.5


def draw(*shape, seed=0):
    """Scores and importance, float64."""
    random = torch.Generator().manual_seed(seed)
    scores = torch.randn(*shape, generator=random, dtype=torch.float64)
    return scores, torch.rand(*shape, generator=random, dtype=torch.float64) ** 4


def test_cross_entropy_by_hand():
    # Shares 3/4 and 1/4; softmax of (log 2, 0) is 2/3 and 1/3.
    scores, importance = torch.tensor([[math.log(2), 0.0]]), torch.tensor([[6.0, 2.0]])
    expected = -(0.75 * math.log(2 / 3) + 0.25 * math.log(1 / 3))
    assert cross_entropy(scores, importance).item() == pytest.approx(expected)
    assert cross_entropy(scores, torch.zeros(1, 2)).item() == 0


def test_squared_error_by_hand():
    scores = torch.tensor([[1.0, 0.0]])
    importance = torch.tensor([[math.e**3, 0.0]])
    expected = (4 + math.log(FLOOR) ** 2) / 2
    assert squared_error(scores, importance).item() == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("name", ["listwise", "regress"])
def test_objectives_average_over_the_contexts_a_head_learns_from(name):
    loss = {"listwise": cross_entropy, "regress": squared_error}[name]
    first, second = draw(2, 5), draw(2, 8, seed=1)
    batch = batch_with(first, second, counted=[[True, True], [False, True]])
    losses, _ = load_objective(name)(batch, PRESETS["fourier"])
    one, two = loss(*first), loss(*second)
    torch.testing.assert_close(losses, torch.stack([one[0], (one[1] + two[1]) / 2]))


@pytest.mark.parametrize("name", ["rloo", "rloo_batch"])
def test_a_context_of_equal_rewards_teaches_only_against_other_contexts(name):
    """All rankings of equal importance keep the same; `rloo` compares within a context alone."""
    scores, importance = draw(1, 6)
    flat = scores.float().requires_grad_()
    batch = batch_with(
        (flat, torch.ones(1, 6)), (scores.float(), importance.float()), counted=[[True], [True]]
    )
    losses, _ = load_objective(name)(batch, replace(PRESETS["paper"], reward="ratio"))
    (gradient,) = torch.autograd.grad(losses.sum(), flat)
    assert bool(gradient.abs().max() < 1e-6) == (name == "rloo")
