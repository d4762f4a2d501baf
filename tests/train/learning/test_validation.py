import json

import numpy as np
import pytest
import torch

from kvp.geometry import Geometry
from kvp.ranking_metrics import grid_budgets
from kvp.scoring import View
from policies.ranker import HeadRankers, RankerSpec
from policies.registry import SCORERS
from train.data.contexts import RankingContext
from train.learning.validation import HEURISTICS, heuristic_skills, validate_rankers

TOKENS, HEADS = 40, 2


@pytest.fixture
def rankers():
    return HeadRankers(RankerSpec(head_dim=4, hidden=8), HEADS, torch.Generator().manual_seed(0))


def context(importance, *, seed=0, keys=None, values=None):
    """Random keys and values of heads with given importance [H, N]."""
    heads, tokens = importance.shape
    drawn = torch.randn(2, heads, tokens, 4, generator=torch.Generator().manual_seed(seed))
    return RankingContext(
        keys=drawn[0] if keys is None else keys,
        values=drawn[1] if values is None else values,
        importance=importance,
    )


def peaked(seed, heads=HEADS, tokens=TOKENS):
    return torch.rand(heads, tokens, generator=torch.Generator().manual_seed(seed)) ** 6


def test_attention_lost_follows_the_protected_ranking_and_skill_the_whole_one(rankers):
    one = context(peaked(1))
    result = validate_rankers(rankers, [one])
    scores = rankers(one.keys, one.values, one.positions, TOKENS).detach().double().numpy()
    protected = [39, 0, 38, 1, 37, 2, 36, 3, *range(35, 23, -1)]
    for head in range(HEADS):
        importance = one.importance[head].double().numpy()
        rest = range(4, 24)
        order = protected + sorted(rest, key=lambda i: -scores[head, i])
        lost = importance[order[10:]].sum() / importance.sum()
        assert result.lost["25%"][head].item() == pytest.approx(lost, rel=1e-5)

        # Skill is that of the ranking without protection.
        ranks = np.argsort(np.argsort(-scores[head]))
        cost = (ranks * importance).sum()
        ideal = (np.arange(TOKENS) * np.sort(importance)[::-1]).sum()
        chance = importance.sum() * (TOKENS - 1) / 2
        skill = (chance - cost) / (chance - ideal)
        assert result.skill[head].item() == pytest.approx(skill, rel=1e-5)


def test_contexts_in_which_a_head_has_no_signal_do_not_count(rankers):
    flat = torch.ones(HEADS, TOKENS)
    flat[0] = peaked(1)[0]
    mixed, other = context(flat, seed=1), context(peaked(2), seed=2)
    both = validate_rankers(rankers, [other, mixed])
    first = validate_rankers(rankers, [other])
    second = validate_rankers(rankers, [mixed])
    assert both.skill[1] == first.skill[1]
    assert both.skill[0].item() == pytest.approx((first.skill[0] + second.skill[0]).item() / 2)
    assert torch.isnan(second.skill[1])
    assert both.contexts == 2


def test_evaluation_names_the_head_that_a_heuristic_ranks_better(rankers):
    one = context(peaked(1))
    one.importance[1] = 1 / one.keys[1].norm(dim=-1)
    geometry = Geometry(layers=1, query_heads=2, kv_heads=2, head_dim=4)
    result = validate_rankers(rankers, iter([one]), geometry=geometry, heads=range(2))
    assert torch.equal(result.skill, validate_rankers(rankers, [one]).skill)
    assert result.count_losing_heads() >= 1
    assert validate_rankers(rankers, [one]).best_heuristics() == [None, None]
    head = result.per_head()[1]
    assert head["best_heuristic"] == "knorm"
    assert head["best_heuristic_skill"] == pytest.approx(1.0, abs=1e-4)


def test_flat_heads_have_no_best_heuristic(rankers):
    geometry = Geometry(layers=1, query_heads=2, kv_heads=2, head_dim=4)
    flat = context(torch.ones(HEADS, TOKENS))
    result = validate_rankers(rankers, [flat], geometry=geometry, heads=range(2))
    assert result.count_losing_heads() == 0
    head = json.loads(json.dumps(result.per_head(), allow_nan=False))[0]
    assert (head["skill"], head["best_heuristic"], head["best_heuristic_skill"]) == (None,) * 3


MODEL = Geometry(layers=3, query_heads=4, kv_heads=4, head_dim=4)


def skills_of(context, heads=range(12)):
    return dict(zip(HEURISTICS, heuristic_skills(context, MODEL, heads), strict=True))


def test_the_registry_decides_which_methods_are_compared():
    assert set(HEURISTICS) == {"random", "streaming_llm", "knorm", "keydiff", "lagkv"}


def test_numbers_are_those_of_one_budget_after_the_other():
    """lagkv, which looks at the budget: scored at the grid, evicting budget by budget."""
    tokens = 64
    one = context(peaked(4, 12, tokens))
    skills, scorer = skills_of(one)["lagkv"], SCORERS["lagkv"]()
    for index in (0, 6):
        layer, head = divmod(index, 4)
        weights = one.importance[index].double().numpy()
        cost = 0.0
        for budget in range(1, tokens):
            view = View(
                layer=layer,
                keys=one.keys[None, 4 * layer : 4 * layer + 4],
                values=one.values[None, 4 * layer : 4 * layer + 4],
                positions=one.positions[None],
                budget=min(point for point in grid_budgets(tokens) if point >= budget),
            )
            scores = scorer.score(view)[0, head].numpy()
            ranked = sorted(range(tokens), key=lambda i: (-scores[i], -i))
            cost += weights[ranked[budget:]].sum()
        chance = weights.sum() * (tokens - 1) / 2
        ideal = (np.arange(tokens) * np.sort(weights)[::-1]).sum()
        expected = (chance - cost) / (chance - ideal)
        assert skills[index].item() == pytest.approx(expected, abs=1e-4)


def test_some_heads_are_evaluated_as_among_all():
    """Slices may begin and end within a layer; `random` draws by layer and head."""
    whole = context(peaked(5, 12, 64))
    everything = skills_of(whole)
    for heads in (range(2, 7), range(5, 6), range(4, 8), range(9, 12)):
        part = slice(heads.start, heads.stop)
        shard = context(whole.importance[part], keys=whole.keys[part], values=whole.values[part])
        for name, skill in skills_of(shard, heads=heads).items():
            torch.testing.assert_close(skill, everything[name][part], atol=1e-6, rtol=0)
