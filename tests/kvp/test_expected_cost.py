"""The closed form against enumeration and finite differences."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

from kvp.reward import expected_cost


def test_expected_cost_is_the_mean_over_all_rankings() -> None:
    scores = np.array([0.7, -0.4, 1.5, 0.0, -2.0])
    importance = np.array([0.1, 2.0, 0.0, 1.0, 0.5])
    mean = 0.0
    for ranking in itertools.permutations(range(5)):
        rest, probability = list(range(5)), 1.0
        for token in ranking:
            probability *= np.exp(scores[token]) / np.exp(scores[rest]).sum()
            rest.remove(token)
        mean += probability * sum(rank * importance[token] for rank, token in enumerate(ranking))
    for block in (1, 2, 256):
        result = expected_cost(torch.tensor(importance), torch.tensor(scores), block).item()
        assert result == pytest.approx(mean, rel=1e-12)


def test_expected_ranks_sum_to_a_constant() -> None:
    ones = torch.ones(31, dtype=torch.float64)  # cost of all ones = sum of (rank - 1)
    scores = torch.randn(31, dtype=torch.float64)
    assert expected_cost(ones, scores).item() == pytest.approx(31 * 30 / 2)


def test_gradient_agrees_with_finite_differences_whatever_the_tiles() -> None:
    random = torch.Generator().manual_seed(0)
    scores = torch.randn(2, 3, 11, generator=random, dtype=torch.float64, requires_grad=True)
    importance = torch.rand(2, 3, 11, generator=random, dtype=torch.float64)
    for block in (1, 4, 11, 64):
        assert torch.autograd.gradcheck(lambda s, b=block: expected_cost(importance, s, b), scores)


def test_wrong_arguments_are_refused() -> None:
    weights = torch.ones(3)
    with pytest.raises(ValueError, match="agree"):
        expected_cost(weights, torch.ones(4))
    with pytest.raises(TypeError, match="int64"):
        expected_cost(torch.arange(3), torch.ones(3))
