"""The oracle hands the future through, and its ranking is optimal at every budget."""

from __future__ import annotations

from collections.abc import Callable
from itertools import combinations

import torch

from kvp.ranking import rank_tokens
from kvp.scoring import View
from policies.oracle import Oracle

MakeView = Callable[..., View]


def test_scores_are_the_future_attention(make_view: MakeView) -> None:
    view = make_view(tokens=9)
    assert view.future is not None
    assert Oracle().needs.future
    assert torch.equal(Oracle().score(view), view.future)


def test_no_set_of_any_size_keeps_more(make_view: MakeView) -> None:
    view = make_view(tokens=7, batch=1, heads=1)
    assert view.future is not None
    weights = view.future[0, 0].tolist()
    ranking = rank_tokens(Oracle().score(view))[0, 0].tolist()
    for budget in range(8):
        best = max(sum(weights[i] for i in kept) for kept in combinations(range(7), budget))
        assert sum(weights[i] for i in ranking[:budget]) >= best - 1e-6
