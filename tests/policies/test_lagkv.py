"""LagKV: short caches, order, ties and options; `tests/golden` computes the scores again."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from kvp.ranking import rank_tokens
from kvp.scoring import View
from policies.lagkv import LagKV

MakeView = Callable[..., View]


@pytest.mark.parametrize("tokens", [1, 3, 4, 12, 259])
def test_short_caches_are_ranked_by_recency_after_the_sinks(
    make_view: MakeView, tokens: int
) -> None:
    """n < n_sink + 2 lag; 259 is the last such length of kvpress' defaults."""
    ranking = rank_tokens(LagKV(lag=128).score(make_view(tokens=tokens)))
    sinks = list(range(min(4, tokens)))
    assert ranking[0, 0].tolist() == sinks + list(range(tokens - 1, len(sinks) - 1, -1))


def test_ranking_order_sinks_tail_then_interleaved_partitions(make_view: MakeView) -> None:
    """4 sinks, three partitions of 5, remainder 2; tail = last partition and remainder."""
    ranking = rank_tokens(LagKV(lag=5).score(make_view(tokens=21)))[0, 0].tolist()
    assert ranking[:4] == [0, 1, 2, 3]
    assert ranking[4:11] == [20, 19, 18, 17, 16, 15, 14]
    assert [(token - 4) // 5 for token in ranking[11:]] == [1, 0] * 5


@pytest.mark.parametrize(
    ("budget", "lag"), [(1, 4), (16, 4), (20, 5), (64, 16), (512, 128), (4096, 128)]
)
def test_auto_lag_follows_the_budget(make_view: MakeView, budget: int, lag: int) -> None:
    assert LagKV().lag_for(budget) == lag
    view = make_view(tokens=90, budget=budget)
    assert torch.equal(LagKV().score(view), LagKV(lag=lag).score(view))


def test_long_partitions_of_ties_stay_in_order(make_view: MakeView) -> None:
    """Long enough that an unstable sort would show."""
    view = make_view(tokens=4 + 3 * 300)
    view.keys[:], view.values[:] = 1.0, 1.0
    expected = (torch.arange(300) / 300).repeat(2)
    torch.testing.assert_close(LagKV(lag=300).score(view)[1, 1, 4:604], expected)
