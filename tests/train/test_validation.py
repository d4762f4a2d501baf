from __future__ import annotations

import json

import numpy as np
import pytest
import torch

from kvp.geometry import Geometry
from kvp.ranking import UNPROTECTED, Protection
from policies.ranker import HeadRankers, RankerSpec
from train.data.contexts import Context
from train.validation import evaluate, evaluate_with_baselines

TOKENS, HEADS = 40, 2


@pytest.fixture
def rankers() -> HeadRankers:
    return HeadRankers(RankerSpec(head_dim=4, hidden=8), HEADS, torch.Generator().manual_seed(0))


def context(seed: int, importance: torch.Tensor | None = None) -> Context:
    random = torch.Generator().manual_seed(seed)
    if importance is None:
        importance = torch.rand(HEADS, TOKENS, generator=random) ** 6
    return Context(
        keys=torch.randn(HEADS, TOKENS, 4, generator=random),
        values=torch.randn(HEADS, TOKENS, 4, generator=random),
        positions=torch.arange(TOKENS),
        length=TOKENS,
        importance=importance,
    )


def lost_by(order: list[int], importance: np.ndarray) -> np.ndarray:
    """Share of the attention lost at budgets 0..N, one budget after the other."""
    total = importance.sum()
    return np.array([importance[order[budget:]].sum() / total for budget in range(TOKENS + 1)])


def test_areas_and_budgets_follow_the_protected_ranking(rankers: HeadRankers) -> None:
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

        # Skill is over the 20 unprotected tokens alone.
        weights = importance[4:24]
        ranks = np.argsort(np.argsort(-scores[head, 4:24]))
        cost, ideal = (ranks * weights).sum(), (np.arange(20) * np.sort(weights)[::-1]).sum()
        chance = weights.sum() * 19 / 2
        skill = (chance - cost) / (chance - ideal)
        assert result.skill[head].item() == pytest.approx(skill, rel=1e-5)


def test_contexts_in_which_a_head_has_no_signal_do_not_count(rankers: HeadRankers) -> None:
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


def test_the_excess_is_what_is_lost_beyond_the_oracle(rankers: HeadRankers) -> None:
    result = evaluate(rankers, [context(1), context(2)], reward_protection=Protection())
    assert torch.equal(result.excess, result.area - result.oracle_area)
    assert float(result.excess.min()) > 0
    assert result.per_head()[1]["excess"] == result.excess[1].item()


def test_evaluation_names_the_head_that_recency_ranks_better(rankers: HeadRankers) -> None:
    importance = context(1).importance.clone()
    importance[1] = torch.arange(TOKENS) ** 2.0
    one = context(1, importance)
    geometry = Geometry(layers=1, query_heads=2, kv_heads=2, head_dim=4)
    result = evaluate_with_baselines(rankers, iter([one]), geometry, reward_protection=Protection())
    alone = evaluate(rankers, [one], reward_protection=Protection())
    assert torch.equal(result.skill, alone.skill)
    assert alone.baselines is None
    assert alone.losing_heads() == []
    assert 1 in result.losing_heads()
    head = result.per_head()[1]
    assert head["best_heuristic"] == "streaming_llm"
    assert head["best_heuristic_skill"] == pytest.approx(1.0, abs=1e-4)
    assert head["parameters"] == sum(x.numel() for x in rankers.parameters()) // HEADS
    assert "best_heuristic" not in alone.per_head()[1]


def test_flat_heads_have_no_best_heuristic(rankers: HeadRankers) -> None:
    geometry = Geometry(layers=1, query_heads=2, kv_heads=2, head_dim=4)
    flat = context(1, torch.ones(HEADS, TOKENS))
    result = evaluate_with_baselines(rankers, [flat], geometry, reward_protection=UNPROTECTED)
    assert result.losing_heads() == []
    head = json.loads(json.dumps(result.per_head(), allow_nan=False))[0]
    assert (head["skill"], head["best_heuristic"], head["best_heuristic_skill"]) == (None,) * 3
