"""The closed form against enumeration, sampling and finite differences."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

from kvp.expected_cost import expected_cost, sampled_expected_cost
from kvp.plackett_luce import gumbel_sort, log_prob
from kvp.reward import all_budgets_cost, rloo_advantages


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


def test_expected_cost_agrees_with_sampling() -> None:
    rng = np.random.default_rng(3)
    importance = torch.tensor(rng.exponential(size=100))
    scores = torch.tensor(rng.normal(size=100))
    rankings = gumbel_sort(scores, 4000, torch.Generator().manual_seed(0))
    costs = all_budgets_cost(importance, rankings)
    standard_error = costs.std().item() / 4000**0.5
    assert abs(costs.mean().item() - expected_cost(importance, scores).item()) < 3 * standard_error


def test_expected_ranks_sum_to_a_constant() -> None:
    ones = torch.ones(31, dtype=torch.float64)  # cost of all ones = sum of (rank - 1)
    scores = torch.randn(31, dtype=torch.float64)
    assert expected_cost(ones, scores).item() == pytest.approx(31 * 30 / 2)


def test_rloo_gradient_estimates_the_exact_gradient() -> None:
    importance = torch.rand(12, dtype=torch.float64) ** 3
    exact = torch.randn(12, dtype=torch.float64, requires_grad=True)
    expected_cost(importance, exact).backward()
    sampled = exact.detach().clone().requires_grad_()
    rankings = gumbel_sort(sampled, 20_000, torch.Generator().manual_seed(1))
    advantages = rloo_advantages(-all_budgets_cost(importance, rankings))
    (advantages * log_prob(sampled, rankings)).mean().backward()
    assert exact.grad is not None
    assert sampled.grad is not None
    similarity = torch.nn.functional.cosine_similarity(-exact.grad, sampled.grad, dim=0).item()
    assert similarity > 0.99


def test_gradient_agrees_with_finite_differences_whatever_the_tiles() -> None:
    random = torch.Generator().manual_seed(0)
    scores = torch.randn(2, 3, 11, generator=random, dtype=torch.float64, requires_grad=True)
    importance = torch.rand(2, 3, 11, generator=random, dtype=torch.float64)
    for block in (1, 4, 11, 64):
        assert torch.autograd.gradcheck(lambda s, b=block: expected_cost(importance, s, b), scores)


def test_sampled_opponents_are_unbiased() -> None:
    random = torch.Generator().manual_seed(1)
    importance = torch.rand(30, generator=random, dtype=torch.float64) ** 4
    scores = torch.randn(30, generator=random, dtype=torch.float64, requires_grad=True)
    exact = expected_cost(importance, scores)
    (gradient,) = torch.autograd.grad(exact, scores)
    costs, gradients = [], []
    for seed in range(3000):
        noise = torch.Generator().manual_seed(seed)
        cost = sampled_expected_cost(importance, scores, 4, noise)
        costs.append(cost.detach())
        gradients.append(torch.autograd.grad(cost, scores)[0])
    sample, slopes = torch.stack(costs), torch.stack(gradients)
    assert abs(sample.mean() - exact) < 3 * sample.std() / 3000**0.5
    errors = slopes.std(0) / 3000**0.5
    assert ((slopes.mean(0) - gradient).abs() < 4.5 * errors).all()


def test_all_opponents_are_exact() -> None:
    importance, scores = torch.rand(2, 20), torch.randn(2, 20)
    every = sampled_expected_cost(importance, scores, 20)
    torch.testing.assert_close(every, expected_cost(importance, scores))


def test_memory_is_that_of_a_tile() -> None:
    scores = torch.randn(20_000, requires_grad=True)
    expected_cost(torch.rand(20_000), scores, 64).backward()  # all pairs would be 1.6 GB
    assert scores.grad is not None
    assert abs(scores.grad.sum()) < 1e-2 * scores.grad.abs().sum()


def test_wrong_arguments_are_refused() -> None:
    weights = torch.ones(3)
    with pytest.raises(ValueError, match="agree"):
        expected_cost(weights, torch.ones(4))
    with pytest.raises(TypeError, match="int64"):
        expected_cost(torch.arange(3), torch.ones(3))
    with pytest.raises(ValueError, match="at least 1 opponent"):
        sampled_expected_cost(weights, weights, 0)
