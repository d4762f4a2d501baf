import itertools

import numpy as np
import pytest
import torch

from kvp.reward import (
    all_budgets_cost,
    cost_curve,
    expected_cost,
    gumbel_sort,
    ideal_cost,
    random_cost,
    ratio_reward,
    reward_rankings,
    rloo_advantages,
    skill_reward,
)


def _example(tokens, seed=0):
    rng = np.random.default_rng(seed)
    return torch.tensor(rng.exponential(size=tokens)), torch.tensor(rng.permutation(tokens))


def test_curve_and_closed_form_are_those_of_every_budget():
    importance, ranking = _example(57)
    # E_b for b = 0..N by dropping everything after the first b tokens (equation 5).
    losses = np.array([importance[ranking[size:]].sum().item() for size in range(58)])
    curve = cost_curve(importance, ranking)
    np.testing.assert_allclose(curve, losses, atol=1e-12)
    assert curve[57] == 0
    cost = all_budgets_cost(importance, ranking).item()
    assert cost == pytest.approx(losses[1:57].sum(), rel=1e-12)
    assert losses[:57].sum() - cost == pytest.approx(importance.sum().item(), rel=1e-12)


def test_numbers_by_hand():
    importance = torch.tensor([1.0, 4.0, 2.0, 0.0])
    ranking = torch.tensor([2, 1, 3, 0])  # importance in order: 2, 4, 0, 1
    assert cost_curve(importance, ranking).tolist() == [7, 5, 1, 1, 0]
    assert all_budgets_cost(importance, ranking) == 7  # 0*2 + 1*4 + 2*0 + 3*1
    assert ideal_cost(importance) == 4  # 4, 2, 1, 0 -> 2 + 2*1
    assert random_cost(importance) == 10.5  # 7 * 3 / 2
    assert reward_rankings(skill_reward, importance, ranking).item() == pytest.approx(3.5 / 6.5)
    ratio = reward_rankings(ratio_reward, importance, ranking).item()
    assert ratio == pytest.approx(-14 / 11)  # coefficients r


def test_no_ranking_beats_the_ideal_and_chance_is_the_mean():
    importance, _ = _example(6)
    rankings = torch.tensor(list(itertools.permutations(range(6))))
    costs = all_budgets_cost(importance, rankings)
    assert costs.min().item() == pytest.approx(ideal_cost(importance).item(), rel=1e-12)
    assert costs.mean().item() == pytest.approx(random_cost(importance).item(), rel=1e-12)
    best = importance.argsort(descending=True)
    assert reward_rankings(skill_reward, importance, best).item() == pytest.approx(1.0)
    assert reward_rankings(ratio_reward, importance, best).item() == pytest.approx(-1.0)


def test_rewards_are_linear_in_the_cost():
    importance, ranking = _example(9)
    _, other = _example(9, seed=1)
    rankings = torch.stack([ranking, other])
    mean_cost = all_budgets_cost(importance, rankings).mean()
    for reward in (skill_reward, ratio_reward):  # no ranking here is on the floor
        expected = reward_rankings(reward, importance, rankings).mean()
        torch.testing.assert_close(reward(importance, mean_cost), expected)


def test_contexts_with_nothing_to_learn_give_no_reward():
    importance = torch.stack([torch.full((8,), 0.25), torch.zeros(8)])
    rankings = gumbel_sort(torch.zeros(2, 8), 3)
    assert torch.equal(reward_rankings(skill_reward, importance, rankings), torch.zeros(3, 2))
    assert reward_rankings(ratio_reward, importance, rankings).isfinite().all()


def test_ratio_is_clamped():
    importance = torch.zeros(1000)
    importance[0] = 1.0
    worst = torch.arange(1000).flip(0)
    assert reward_rankings(ratio_reward, importance, worst) == -200
    assert reward_rankings(ratio_reward, importance, worst.flip(0)) == -1


def test_leave_one_out_advantages():
    assert rloo_advantages(torch.tensor([1.0, 2.0, 3.0])).tolist() == [-1.5, 0.0, 1.5]
    rewards = np.random.default_rng(0).normal(size=(5, 3))
    expected = [row - np.delete(rewards, k, axis=0).mean(0) for k, row in enumerate(rewards)]
    result = rloo_advantages(torch.tensor(rewards))
    np.testing.assert_allclose(result, np.stack(expected), atol=1e-12)
    np.testing.assert_allclose(result.sum(0), 0, atol=1e-12)


def test_expected_cost_is_the_mean_over_all_rankings():
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


def test_gradient_agrees_with_finite_differences_whatever_the_tiles():
    random = torch.Generator().manual_seed(0)
    scores = torch.randn(2, 3, 11, generator=random, dtype=torch.float64, requires_grad=True)
    importance = torch.rand(2, 3, 11, generator=random, dtype=torch.float64)
    for block in (1, 4, 11, 64):
        assert torch.autograd.gradcheck(lambda s, b=block: expected_cost(importance, s, b), scores)
