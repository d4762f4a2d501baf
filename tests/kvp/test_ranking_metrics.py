"""Metrics of rankings: by hand, of random rankings, and of the ideal one."""

import pytest
import torch

from kvp.protection import UNPROTECTED, Protection
from kvp.ranking_metrics import attention_lost, grid_budgets, has_signal, lost_importance, skill

PROTECTIONS = [UNPROTECTED, Protection(), Protection(sinks=0, recents=3)]


def skill_of(importance, scores, protection):
    lost = lost_importance(importance, [(scores, scores.shape[-1])], protection)
    return skill(importance, lost, protection)


def test_three_tokens_by_hand():
    # 6, 3, 1 evicted in the best order lose 10, 4, 1, 0; in the worst 10, 9, 6, 0.
    importance = torch.tensor([6.0, 3.0, 1.0])
    best = lost_importance(importance, [(importance, 3)], UNPROTECTED)
    worst = lost_importance(importance, [(-importance, 3)], UNPROTECTED)
    assert best.tolist() == [10, 4, 1, 0]
    assert worst.tolist() == [10, 9, 6, 0]
    assert attention_lost(best).tolist() == pytest.approx([1, 0.4, 0.1, 0])
    assert skill(importance, best).item() == pytest.approx(1)
    assert skill(importance, worst).item() == pytest.approx(-1)


@pytest.mark.parametrize("protection", PROTECTIONS)
def test_random_rankings_have_no_skill_and_the_ideal_one_all(protection):
    random = torch.Generator().manual_seed(0)
    importance = torch.rand(1, 40, generator=random, dtype=torch.float64) ** 4
    importance = importance.expand(4000, -1)
    scores = torch.rand(4000, 40, generator=random)
    drawn = lost_importance(importance, [(scores, 40)], protection)
    skills = skill(importance, drawn, protection)
    error = skills.std() / 4000**0.5
    assert abs(skills.mean()) < 4 * error
    ideal = lost_importance(importance[:1], [(importance[:1], 40)], protection)
    assert skill(importance[:1], ideal, protection).item() == pytest.approx(1, abs=1e-12)


def test_protected_tokens_neither_raise_nor_lower_skill():
    random = torch.Generator().manual_seed(1)
    importance, scores = torch.rand(2, 3, 50, generator=random, dtype=torch.float64)
    protection = Protection(sinks=2, recents=5)
    expected = skill_of(importance[:, 2:45], scores[:, 2:45], UNPROTECTED)
    assert torch.allclose(skill_of(importance, scores, protection), expected, atol=1e-12)
    loud = importance.clone()
    loud[:, :2] *= 1e3
    assert torch.allclose(skill_of(loud, scores, protection), expected, atol=1e-9)


def test_heads_without_signal_have_no_skill():
    importance = torch.ones(2, 30)
    importance[1] += torch.arange(30)
    assert has_signal(importance).tolist() == [False, True]
    assert skill_of(importance, importance, UNPROTECTED).isnan().tolist() == [True, False]
    short = torch.rand(2, 5)
    assert skill_of(short, short, Protection()).isnan().all()
    nothing = torch.zeros(1, 4)
    lost = lost_importance(nothing, [(nothing, 4)], UNPROTECTED)
    assert attention_lost(lost).tolist() == [[0] * 5]


def test_each_ranking_serves_the_budgets_up_to_its_own():
    importance = torch.tensor([[1.0, 2.0, 4.0, 8.0]])
    up, down = torch.arange(4.0)[None], -torch.arange(4.0)[None]
    lost = lost_importance(importance, [(down, 1), (up, 4)], UNPROTECTED)
    assert lost.tolist() == [[15.0, 14.0, 3.0, 1.0, 0.0]]


def test_the_grid_ends_at_the_whole_cache_and_never_doubles():
    assert grid_budgets(512) == [8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512]
    assert grid_budgets(2) == [1, 2]
    assert grid_budgets(20)[-1] == 20
