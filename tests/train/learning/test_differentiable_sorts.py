"""Differentiable sorts: published numbers, independent formulas, limits, gradients, the objective.

Rank 1 goes to the largest score; the published soft ranks are ascending, hence the minus signs.
"""

import itertools
from dataclasses import replace

import pytest
import torch

from kvp.ranking import rank_tokens
from kvp.reward import reward_rankings, skill_reward
from train.learning.differentiable_sorts import rank_error, soft_rank, soft_rank_objective
from train.learning.losses import Batch
from train.recipe import PRESETS


def draw(*shape, seed=0):
    random = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=random, dtype=torch.float64)


@pytest.mark.parametrize(("strength", "ranks"), [(2.0, [3, 1.25, 1.75]), (1.0, [3, 1, 2])])
def test_published_soft_ranks(strength, ranks):
    scores = torch.tensor([5.0, 1.0, 2.0])
    assert soft_rank(-scores, strength).tolist() == ranks
    assert soft_rank(scores, strength).tolist() == [4 - rank for rank in ranks]


@pytest.mark.parametrize("strength", [0.1, 0.5, 1.0, 3.0])
def test_soft_ranks_are_the_projection_onto_the_permutahedron(strength):
    """They lie in it: any k ranks sum to at most the k largest ones, all of them to N (N + 1) / 2.
    And it lies on one side of the plane through them that faces the point, so none is nearer."""
    corners = torch.tensor([*itertools.permutations(range(1, 6))], dtype=torch.float64)  # [120, 5]
    most = torch.arange(5, 0, -1).double().cumsum(0)
    for seed in range(3):
        scores = draw(5, seed=seed)
        ranks = soft_rank(scores, strength)
        sums = ranks.sort(descending=True).values.cumsum(0)
        assert (sums <= most + 1e-9).all()
        assert sums[-1].item() == pytest.approx(15)
        assert ((corners - ranks) @ (-scores / strength - ranks)).max() < 1e-9


def test_soft_ranks_have_hard_and_constant_limits():
    scores = draw(3, 12)
    hard = 1 + (scores[..., None, :] > scores[..., :, None]).double().sum(-1)  # 1 for the largest
    torch.testing.assert_close(soft_rank(scores, 1e-6), hard)
    middle = torch.full((9,), 5.0, dtype=torch.float64)
    torch.testing.assert_close(soft_rank(draw(9), 1e9), middle)
    torch.testing.assert_close(soft_rank(torch.zeros(9, dtype=torch.float64), 0.1), middle)


HARD = 1e-9


def scored(tokens):
    """Scores and heavy-tailed importance [2, N] float64."""
    random = torch.Generator().manual_seed(0)
    scores = torch.randn(2, tokens, generator=random, dtype=torch.float64)
    return scores, torch.rand(2, tokens, generator=random, dtype=torch.float64) ** 4


def losses(scores, importance, **settings):
    batch = Batch(
        scores=[scores],
        importances=[importance],
        counted=torch.ones(1, len(scores), dtype=torch.bool),
        seeds=[7],
    )
    return soft_rank_objective(batch, replace(PRESETS["fourier"], **settings))[0]


def test_the_cost_variant_hardens_to_minus_the_skill_of_the_ranking():
    scores, importance = scored(15)
    expected = -reward_rankings(skill_reward, importance, scores.argsort(descending=True))
    torch.testing.assert_close(losses(scores, importance, temperature=HARD), expected)


def test_the_rank_variant_is_zero_for_the_right_order_only():
    _, importance = scored(15)
    right = importance.log()
    limit = {"temperature": HARD, "sort_loss": "ranks"}
    assert losses(right, importance, **limit).max() < 1e-20
    # Reversed ranks are r and 16 - r: mean of (16 - 2 r)^2 over 15^2.
    reverse = sum((16 - 2 * rank) ** 2 for rank in range(1, 16)) / 15 / 15**2
    result = losses(-right, importance, **limit)
    torch.testing.assert_close(result, torch.full_like(result, reverse))


@pytest.mark.parametrize("sort_loss", ["ranks", "cost"])
def test_following_the_gradient_ranks_better(sort_loss):
    """Softened costs that rankings do not have to follow would end at a skill near 0 here."""
    scores, importance = scored(20)
    for _ in range(200):
        scores = scores.detach().requires_grad_()
        loss = losses(scores, importance, temperature=1.0, sort_loss=sort_loss)
        (gradient,) = torch.autograd.grad(loss.sum(), scores)
        scores = scores - 0.08 * gradient / gradient.norm(dim=-1, keepdim=True)
    skill = reward_rankings(skill_reward, importance, scores.argsort(descending=True))
    assert skill.min() > 0.9


def test_rank_error_by_hand():
    importance = torch.tensor([0.1, 0.7, 0.2])  # true ranks 3, 1, 2
    assert rank_error(torch.tensor([3.0, 1.0, 2.0]), importance) == 0
    error = rank_error(torch.tensor([2.0, 1.0, 3.0]), importance).item()
    assert error == pytest.approx(2 / 3 / 9)
    ties = torch.tensor([0.0, 0.5, 0.0])  # the newer of equal tokens comes first
    assert rank_error(torch.tensor([3.0, 1.0, 2.0]), ties) == 0
    assert rank_tokens(ties).tolist() == [1, 2, 0]


@pytest.mark.parametrize("sort_loss", ["ranks", "cost"])
def test_equal_scores_have_finite_gradients(sort_loss):
    scores, importance = scored(10)
    scores = torch.zeros_like(scores).requires_grad_()
    loss = losses(scores, importance, sort_loss=sort_loss)
    (gradient,) = torch.autograd.grad(loss.sum(), scores)
    assert gradient.isfinite().all()
