import json

import numpy as np
import pytest
import torch

from kvp.ranking import UNPROTECTED, Protection
from policies.ranker import HeadRankers, RankerSpec
from train.data.contexts import RankingContext
from train.learning.validation import evaluate

TOKENS, HEADS = 40, 2


@pytest.fixture
def rankers():
    return HeadRankers(RankerSpec(head_dim=4, hidden=8), HEADS, torch.Generator().manual_seed(0))


def context(seed, importance=None):
    random = torch.Generator().manual_seed(seed)
    if importance is None:
        importance = torch.rand(HEADS, TOKENS, generator=random) ** 6
    return RankingContext(
        keys=torch.randn(HEADS, TOKENS, 4, generator=random),
        values=torch.randn(HEADS, TOKENS, 4, generator=random),
        positions=torch.arange(TOKENS),
        length=TOKENS,
        importance=importance,
    )


def lost_by(order, importance):
    """Share of the attention lost at budgets 0..N, one budget after the other."""
    total = importance.sum()
    return np.array([importance[order[budget:]].sum() / total for budget in range(TOKENS + 1)])


def test_areas_and_budgets_follow_the_protected_ranking(rankers):
    one = context(1)
    result = evaluate(rankers, [one], reward_protection=Protection())
    scores = rankers(one.keys, one.values, one.positions, TOKENS).detach().double().numpy()
    protected = [39, 0, 38, 1, 37, 2, 36, 3, *range(35, 23, -1)]
    for head in range(HEADS):
        importance = one.importance[head].double().numpy()
        rest = range(4, 24)
        ours = lost_by(protected + sorted(rest, key=lambda i: -scores[head, i]), importance)
        best = lost_by(protected + sorted(rest, key=lambda i: -importance[i]), importance)
        assert result.area[head].item() == pytest.approx(ours.mean(), rel=1e-5)
        assert result.oracle_area[head].item() == pytest.approx(best.mean(), rel=1e-5)
        assert result.lost["25%"][head].item() == pytest.approx(ours[10], rel=1e-5)
        excess = result.per_head()[head]["excess"]
        assert excess == pytest.approx(ours.mean() - best.mean(), rel=1e-4)

        # Skill is over the 20 unprotected tokens alone.
        weights = importance[4:24]
        ranks = np.argsort(np.argsort(-scores[head, 4:24]))
        cost, ideal = (ranks * weights).sum(), (np.arange(20) * np.sort(weights)[::-1]).sum()
        chance = weights.sum() * 19 / 2
        skill = (chance - cost) / (chance - ideal)
        assert result.skill[head].item() == pytest.approx(skill, rel=1e-5)


def test_contexts_in_which_a_head_has_no_signal_do_not_count(rankers):
    flat = torch.ones(HEADS, TOKENS)
    flat[0] = context(1).importance[0]
    mixed = context(1, flat)
    both = evaluate(rankers, [context(2), mixed], reward_protection=UNPROTECTED)
    first = evaluate(rankers, [context(2)], reward_protection=UNPROTECTED)
    second = evaluate(rankers, [mixed], reward_protection=UNPROTECTED)
    assert both.skill[1] == first.skill[1]
    assert both.skill[0].item() == pytest.approx((first.skill[0] + second.skill[0]).item() / 2)
    assert torch.isnan(second.skill[1])
    assert second.per_head()[1]["skill"] is None
    assert both.contexts == 2


def test_flat_heads_have_no_skill(rankers):
    flat = context(1, torch.ones(HEADS, TOKENS))
    result = evaluate(rankers, [flat], reward_protection=UNPROTECTED)
    head = json.loads(json.dumps(result.per_head(), allow_nan=False))[0]
    assert head["skill"] is None
    assert head["parameters"] == sum(x.numel() for x in rankers.parameters()) // HEADS
