"""Objectives of differentiable sorts: their hard limits, their minimum, thinning."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from kvp.ranking import rank_tokens
from kvp.reward import skill_reward
from train.objectives.losses import Batch, objective_of
from train.objectives.relaxed import MAXIMUM_TOKENS, rank_error, standardised, thinned
from train.recipe import PRESETS

SORTS = ("soft_rank", "soft_sort", "neural_sort")
MATRICES = SORTS[1:]
HARD = 1e-9


def draw(tokens: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Scores and heavy-tailed importance [2, N] float64."""
    random = torch.Generator().manual_seed(seed)
    scores = torch.randn(2, tokens, generator=random, dtype=torch.float64)
    return scores, torch.rand(2, tokens, generator=random, dtype=torch.float64) ** 4


def losses(name: Any, scores: Tensor, importance: Tensor, *, seed: int = 7, **to: Any) -> Tensor:
    batch = Batch(
        scores=[scores],
        importances=[importance],
        counted=torch.ones(1, len(scores), dtype=torch.bool),
        seeds=[seed],
    )
    recipe = replace(PRESETS["fourier"], **{"objective": name, "sort_loss": "cost", **to})
    return objective_of(recipe.objective)(batch, recipe)[0]


@pytest.mark.parametrize("name", SORTS)
def test_the_cost_variant_hardens_to_minus_the_skill_of_the_ranking(name: str) -> None:
    scores, importance = draw(15)
    expected = -skill_reward(importance, scores.argsort(descending=True))
    torch.testing.assert_close(losses(name, scores, importance, temperature=HARD), expected)


@pytest.mark.parametrize("name", SORTS)
def test_the_rank_variant_is_zero_for_the_right_order_only(name: str) -> None:
    _, importance = draw(15)
    right = importance.log()
    limit = {"temperature": HARD, "sort_loss": "ranks"}
    assert losses(name, right, importance, **limit).max() < 1e-20
    # Reversed ranks are r and 16 - r: mean of (16 - 2 r)^2 over 15^2.
    reverse = sum((16 - 2 * rank) ** 2 for rank in range(1, 16)) / 15 / 15**2
    result = losses(name, -right, importance, **limit)
    torch.testing.assert_close(result, torch.full_like(result, reverse))


@pytest.mark.parametrize("sort_loss", ["ranks", "cost"])
@pytest.mark.parametrize("name", SORTS)
def test_following_the_gradient_ranks_better(name: str, sort_loss: Any) -> None:
    """Softened costs that rankings do not have to follow would end at a skill near 0 here."""
    scores, importance = draw(20)
    for _ in range(200):
        scores = scores.detach().requires_grad_()
        loss = losses(name, scores, importance, temperature=1.0, sort_loss=sort_loss)
        (gradient,) = torch.autograd.grad(loss.sum(), scores)
        scores = scores - 0.08 * gradient / gradient.norm(dim=-1, keepdim=True)
    skill = skill_reward(importance, scores.argsort(descending=True))
    assert skill.min() > 0.9


def test_rank_error_by_hand() -> None:
    importance = torch.tensor([0.1, 0.7, 0.2])  # true ranks 3, 1, 2
    assert rank_error(torch.tensor([3.0, 1.0, 2.0]), importance) == 0
    error = rank_error(torch.tensor([2.0, 1.0, 3.0]), importance).item()
    assert error == pytest.approx(2 / 3 / 9)
    ties = torch.tensor([0.0, 0.5, 0.0])  # the newer of equal tokens comes first
    assert rank_error(torch.tensor([3.0, 1.0, 2.0]), ties) == 0
    assert rank_tokens(ties).tolist() == [1, 2, 0]


def test_standardised_scores() -> None:
    result = standardised(torch.tensor([[1.0, 3.0], [-40.0, 60.0], [2.0, 2.0]]))
    torch.testing.assert_close(result, torch.tensor([[-1.0, 1.0], [-1.0, 1.0], [0.0, 0.0]]))


@pytest.mark.parametrize("name", SORTS)
def test_equal_scores_have_finite_gradients(name: str) -> None:
    scores, importance = draw(10)
    scores = torch.zeros_like(scores).requires_grad_()
    for sort_loss in ("ranks", "cost"):
        loss = losses(name, scores, importance, sort_loss=sort_loss)
        (gradient,) = torch.autograd.grad(loss.sum(), scores)
        assert gradient.isfinite().all()


def test_long_contexts_are_thinned() -> None:
    assert thinned(MAXIMUM_TOKENS, 3) is None
    kept = thinned(3_000, 3)
    assert kept is not None
    assert len(kept) == MAXIMUM_TOKENS
    assert (kept.diff() > 0).all()
    assert torch.equal(kept, thinned(3_000, 3))
    assert not torch.equal(kept, thinned(3_000, 4))


@pytest.mark.parametrize("name", MATRICES)
def test_thinned_losses_are_those_of_the_kept_tokens(name: str) -> None:
    scores, importance = (part[:1] for part in draw(1_500))
    scores.requires_grad_()
    loss = losses(name, scores, importance, temperature=HARD)
    kept = thinned(1_500, 7)
    assert kept is not None
    ranking = scores[:, kept].argsort(descending=True)
    expected = -skill_reward(importance[:, kept], ranking)
    torch.testing.assert_close(loss, expected)
    (gradient,) = torch.autograd.grad(loss.sum(), scores)
    dropped = torch.ones(1_500, dtype=torch.bool)
    dropped[kept] = False
    assert gradient[:, dropped].abs().max() == 0
    assert torch.equal(losses(name, scores, importance, temperature=HARD), loss)
    other = losses(name, scores, importance, seed=8, temperature=HARD)
    assert not torch.equal(other, loss)
