"""Listwise and regression losses: by hand and at their minimum."""

from __future__ import annotations

import math

import pytest
import torch

from train.objectives.losses import FLOOR, Batch, cross_entropy, objective_of, squared_error
from train.recipe import PRESETS


def draw(*shape: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Scores and importance, float64."""
    random = torch.Generator().manual_seed(seed)
    scores = torch.randn(*shape, generator=random, dtype=torch.float64)
    return scores, torch.rand(*shape, generator=random, dtype=torch.float64) ** 4


def batch_of(*parts: tuple[torch.Tensor, torch.Tensor], counted: list[list[bool]]) -> Batch:
    return Batch(
        scores=[scores for scores, _ in parts],
        importances=[importance for _, importance in parts],
        counted=torch.tensor(counted),
        seeds=[7] * len(parts),
    )


def test_cross_entropy_by_hand() -> None:
    # Shares 3/4 and 1/4; softmax of (log 2, 0) is 2/3 and 1/3.
    scores, importance = torch.tensor([[math.log(2), 0.0]]), torch.tensor([[6.0, 2.0]])
    expected = -(0.75 * math.log(2 / 3) + 0.25 * math.log(1 / 3))
    assert cross_entropy(scores, importance).item() == pytest.approx(expected)
    assert cross_entropy(scores, torch.zeros(1, 2)).item() == 0


def test_log_shares_are_the_minimum_of_the_cross_entropy() -> None:
    _, importance = draw(3, 20)
    share = importance / importance.sum(-1, keepdim=True)
    best = (share.log() + 5).requires_grad_()  # a constant per context changes nothing
    cross_entropy(best, importance).sum().backward()
    assert best.grad is not None
    torch.testing.assert_close(best.grad, torch.zeros_like(best), rtol=0, atol=1e-12)


def test_squared_error_by_hand() -> None:
    scores = torch.tensor([[1.0, 0.0]])
    importance = torch.tensor([[math.e**3, 0.0]])
    expected = (4 + math.log(FLOOR) ** 2) / 2
    assert squared_error(scores, importance).item() == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("name", ["listwise", "regress"])
def test_objectives_average_over_the_contexts_a_head_learns_from(name: str) -> None:
    loss = {"listwise": cross_entropy, "regress": squared_error}[name]
    first, second = draw(2, 5), draw(2, 8, seed=1)
    batch = batch_of(first, second, counted=[[True, True], [False, True]])
    losses, _ = objective_of(name)(batch, PRESETS["fourier"])
    one, two = loss(*first), loss(*second)
    torch.testing.assert_close(losses, torch.stack([one[0], (one[1] + two[1]) / 2]))
