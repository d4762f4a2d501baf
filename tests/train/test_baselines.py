"""Heuristics on contexts whose importance is made by hand, one head after the other."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from kvp.geometry import Geometry
from kvp.metrics import grid_budgets, lost_importance
from kvp.ranking import UNPROTECTED, Protection
from kvp.scoring import View
from policies.registry import METHODS
from train.baselines import BaselineEvaluator, Baselines
from train.data.contexts import Context

TOKENS, DIM = 64, 4
GEOMETRY = Geometry(layers=3, query_heads=4, kv_heads=4, head_dim=DIM)


def context(importance: Tensor, *, seed: int = 0, keys: Tensor | None = None) -> Context:
    heads, tokens = importance.shape
    random = torch.Generator().manual_seed(seed)
    drawn = torch.randn(2, heads, tokens, DIM, generator=random)
    return Context(
        keys=drawn[0] if keys is None else keys,
        values=drawn[1],
        positions=torch.arange(tokens),
        length=tokens,
        importance=importance,
    )


def evaluated(
    contexts: list[Context],
    heads: range | None = None,
    protection: Protection = UNPROTECTED,
    geometry: Geometry = GEOMETRY,
) -> Baselines:
    evaluate_with_baselines = BaselineEvaluator(geometry, reward_protection=protection, heads=heads)
    assert list(evaluate_with_baselines.watch(contexts)) == contexts
    return evaluate_with_baselines.result()


def test_the_registry_decides_which_methods_are_baselines() -> None:
    names = evaluated([context(torch.rand(12, TOKENS))]).names
    assert set(names) == {"random", "streaming_llm", "knorm", "keydiff", "lagkv"}


def test_a_head_that_looks_back_belongs_to_streaming_llm_and_one_of_small_keys_to_knorm() -> None:
    random = torch.Generator().manual_seed(3)
    keys = torch.randn(12, TOKENS, DIM, generator=random)
    importance = torch.rand(12, TOKENS, generator=random)
    importance[5] = torch.arange(TOKENS) ** 2.0  # the newer, the better
    importance[7] = 1 / keys[7].norm(dim=-1)
    baselines = evaluated([context(importance, keys=keys)], protection=Protection())
    best = baselines.best()
    assert best[5] == ("streaming_llm", pytest.approx(1.0, abs=1e-4))
    assert best[7] == ("knorm", pytest.approx(1.0, abs=1e-4))
    assert baselines.skill[baselines.names.index("knorm"), 5] < 0.5


def lost(
    budget: int, protection: Protection, scores_at: dict[int, np.ndarray], weights: np.ndarray
) -> float:
    """Importance lost at a budget by the scores of the next larger grid budget.

    The order among protected tokens is any: budgets below their number are not looked at.
    """
    scores = scores_at[min(point for point in scores_at if point >= budget)]
    recent = TOKENS - protection.recents
    first = [i for i in range(TOKENS) if i < protection.sinks or i >= recent]
    rest = sorted(set(range(TOKENS)) - set(first), key=lambda i: (-scores[i], -i))
    return float(weights.sum() - weights[[*first, *rest][:budget]].sum())


@pytest.mark.parametrize("protection", [UNPROTECTED, Protection()])
def test_numbers_are_those_of_one_budget_after_the_other(protection: Protection) -> None:
    """lagkv, which looks at the budget: scored at the grid, evicting budget by budget."""
    random = torch.Generator().manual_seed(4)
    one = context(torch.rand(12, TOKENS, generator=random) ** 4)
    baselines = evaluated([one], protection=protection)
    method = baselines.names.index("lagkv")
    scorer = METHODS["lagkv"]()
    for index in (0, 6):
        layer, head = divmod(index, 4)
        weights = one.importance[index].double().numpy()
        scores_at = {}
        for point in grid_budgets(TOKENS):
            view = View(
                layer=layer,
                keys=one.keys[None, 4 * layer : 4 * layer + 4],
                values=one.values[None, 4 * layer : 4 * layer + 4],
                positions=one.positions[None],
                budget=point,
            )
            scores_at[point] = scorer.score(view)[0, head].numpy()
        aside = protection.tokens
        evictable = weights[protection.sinks : TOKENS - protection.recents]
        chance = evictable.sum() * (len(evictable) - 1) / 2
        ideal = (np.arange(len(evictable)) * np.sort(evictable)[::-1]).sum()
        budgets = range(aside + 1, TOKENS)
        cost = sum(lost(budget, protection, scores_at, weights) for budget in budgets)
        assert baselines.skill[method, index].item() == pytest.approx(
            (chance - cost) / (chance - ideal), abs=1e-4
        )
        # Above the protected tokens the area's curve is the protected one, too.
        rankings = [(torch.from_numpy(scores)[None], point) for point, scores in scores_at.items()]
        curve = lost_importance(one.importance[index : index + 1], rankings, Protection())[0]
        for budget in (25, 40, 63):
            expected = lost(budget, Protection(), scores_at, weights)
            assert curve[budget].item() == pytest.approx(expected, rel=1e-4)
        area = (curve / curve[0]).mean().item()
        assert baselines.area[method, index].item() == pytest.approx(area, rel=1e-4)


def test_some_heads_are_evaluated_as_among_all() -> None:
    """Slices may begin and end within a layer; `random` draws by layer and head."""
    random = torch.Generator().manual_seed(5)
    whole = context(torch.rand(12, TOKENS, generator=random))
    everything = evaluated([whole])
    for heads in (range(2, 7), range(5, 6), range(4, 8), range(9, 12)):
        part = slice(heads.start, heads.stop)
        shard = Context(
            keys=whole.keys[part],
            values=whole.values[part],
            positions=whole.positions,
            length=TOKENS,
            importance=whole.importance[part],
        )
        some = evaluated([shard], heads)
        assert torch.allclose(some.skill, everything.skill[:, part], atol=1e-6), heads
        assert torch.allclose(some.area, everything.area[:, part], atol=1e-6), heads


def test_means_leave_out_contexts_in_which_a_head_has_no_signal() -> None:
    random = torch.Generator().manual_seed(6)
    first, second = (torch.rand(12, TOKENS, generator=random) for _ in range(2))
    second[3] = 1.0
    second[8] = first[8] = 1.0
    both = evaluated([context(first), context(second, seed=1)])
    one, other = evaluated([context(first)]), evaluated([context(second, seed=1)])
    assert torch.equal(both.skill[:, 3], one.skill[:, 3])
    assert torch.allclose(both.skill[:, 0], (one.skill[:, 0] + other.skill[:, 0]) / 2)
    assert torch.allclose(both.area, (one.area + other.area) / 2)
    assert bool(both.skill[:, 8].isnan().all())
    assert both.best()[8] is None
    assert both.best()[0] is not None
