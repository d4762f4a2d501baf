"""SnapKV: its window, its edges and its options; `tests/golden` computes the scores again."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from kvp.ranking import rank_tokens
from kvp.scoring import View
from policies.snapkv import SnapKV

MakeView = Callable[..., View]
Array = np.ndarray


@pytest.mark.parametrize("tokens", [1, 7, 8])
def test_caches_within_the_window_are_ranked_by_recency(make_view: MakeView, tokens: int) -> None:
    ranking = rank_tokens(SnapKV(window=8).score(make_view(tokens=tokens)))
    assert ranking[0, 0].tolist() == list(range(tokens - 1, -1, -1))


def test_budgets_within_the_window_keep_the_most_recent(make_view: MakeView) -> None:
    ranking = rank_tokens(SnapKV(window=16).score(make_view(tokens=60, budget=8)))
    assert ranking[1, 1, :16].tolist() == list(range(59, 43, -1))


@pytest.mark.parametrize(
    ("budget", "window"), [(1, 1), (4, 1), (8, 2), (64, 16), (128, 32), (9999, 32)]
)
def test_auto_window_follows_the_budget(make_view: MakeView, budget: int, window: int) -> None:
    assert SnapKV().window_for(budget) == window
    view = make_view(tokens=50, budget=budget)
    assert torch.equal(SnapKV().score(view), SnapKV(window=window).score(view))


def test_ties_of_identical_keys_go_to_the_newer_token(make_view: MakeView) -> None:
    view = make_view(tokens=30)
    view.keys[:] = view.keys[:, :, :1]
    ranking = rank_tokens(SnapKV(window=8, kernel=5, pool="max").score(view))
    assert ranking[0, 0].tolist() == list(range(29, -1, -1))
