import math

import numpy as np
import pytest
import torch

from kvp.reward import gumbel_sort, log_prob


def _stepwise(scores, ranking):
    """Equation 2 taken literally: choose one token after another among those left."""
    total, rest = 0.0, list(range(len(scores)))
    for token in ranking:
        total += scores[token] - math.log(sum(math.exp(scores[other]) for other in rest))
        rest.remove(token)
    return total


def _closed_form_gradient(scores, ranking):
    """1 - exp(s) * (sum of 1/Z over the steps at which the token was still there)."""
    ordered = np.exp(scores[ranking])
    remaining = np.array([ordered[step:].sum() for step in range(len(ordered))])
    gradient = np.empty_like(scores)
    gradient[ranking] = 1 - ordered * np.cumsum(1 / remaining)
    return gradient


def test_equals_the_stepwise_product():
    rng = np.random.default_rng(0)
    scores, ranking = rng.normal(size=9) * 3, rng.permutation(9)
    result = log_prob(torch.tensor(scores), torch.tensor(ranking)).item()
    assert result == pytest.approx(_stepwise(scores, ranking), abs=1e-12)


def test_gradient_is_the_closed_form_and_sums_to_zero():
    rng = np.random.default_rng(1)
    scores, ranking = rng.normal(size=23) * 2, rng.permutation(23)
    leaf = torch.tensor(scores, requires_grad=True)
    log_prob(leaf, torch.tensor(ranking)).backward()
    np.testing.assert_allclose(leaf.grad, _closed_form_gradient(scores, ranking), atol=1e-12)
    assert leaf.grad.sum().item() == pytest.approx(0.0, abs=1e-12)


def test_long_contexts_with_peaked_scores_stay_finite_in_float32():
    scores = (torch.randn(4096) * 30).requires_grad_()
    result = log_prob(scores, gumbel_sort(scores, 2))
    result.sum().backward()
    assert result.isfinite().all()
    assert scores.grad.isfinite().all()


def test_gumbel_sort_draws_with_plackett_luce_frequencies():
    draws = gumbel_sort(torch.tensor([1.0, 0.0, -1.0]), 100_000, torch.Generator().manual_seed(0))
    first = torch.bincount(draws[:, 0], minlength=3) / len(draws)
    # four standard errors of the largest, sqrt(0.25 / 100000), are 0.0063
    np.testing.assert_allclose(first, [0.665, 0.245, 0.090], atol=0.0065)
    in_order = (draws == torch.arange(3)).all(-1).float().mean().item()
    assert in_order == pytest.approx(0.4863, abs=0.0065)


def test_gumbel_sort_shapes_seeds_and_permutations():
    scores = torch.randn(2, 3, 40)
    draws = gumbel_sort(scores, 5, torch.Generator().manual_seed(7))
    assert draws.shape == (5, 2, 3, 40)
    assert draws.dtype == torch.int64
    assert torch.equal(draws.sort(-1).values, torch.arange(40).expand_as(draws))
    assert torch.equal(draws, gumbel_sort(scores, 5, torch.Generator().manual_seed(7)))
    assert log_prob(scores, draws).shape == (5, 2, 3)


def test_a_shard_of_heads_draws_what_the_whole_model_does():
    scores = torch.randn(5, 30)
    whole = gumbel_sort(scores, 4, torch.Generator().manual_seed(7))
    noise = torch.Generator().manual_seed(7)
    part = gumbel_sort(scores[1:3], 4, noise, shard=slice(1, 3), heads=5)
    assert torch.equal(part, whole[:, 1:3])
