"""SnapKV against NumPy loops: window attention, pooling, group mean, and its edges."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch

from kvp.errors import UsageError
from kvp.ranking import rank_tokens
from kvp.scoring import View
from policies.snapkv import SnapKV

MakeView = Callable[..., View]
Array = np.ndarray
Attention = Callable[[View], Array]


def _reference(attention: Array, heads: int, window: int, kernel: int, pool: str) -> Array:
    """Scores of the tokens before the window: [B, H, N - window]."""
    batch, query_heads, tokens, _ = attention.shape
    before, group, half = tokens - window, query_heads // heads, kernel // 2
    result = np.zeros((batch, heads, before))
    for b in range(batch):
        for q in range(query_heads):
            votes = attention[b, q, before:, :before].mean(axis=0)
            for i in range(before):
                near = votes[max(i - half, 0) : i + half + 1]
                pooled = near.max() if pool == "max" else near.sum() / kernel
                result[b, q // group, i] += pooled / group
    return result


@pytest.mark.parametrize(("heads", "group"), [(2, 1), (2, 2), (1, 7)])
@pytest.mark.parametrize(("kernel", "pool"), [(1, "avg"), (5, "avg"), (5, "max"), (7, "max")])
@pytest.mark.parametrize("tokens", [9, 10, 40])
def test_pooled_window_attention(
    make_view: MakeView, causal_attention: Attention,
    heads: int, group: int, kernel: int, pool: str, tokens: int,
) -> None:  # fmt: skip
    view = make_view(tokens=tokens, heads=heads, group=group)
    scores = SnapKV(window=8, kernel=kernel, pool=pool).score(view).numpy()
    expected = _reference(causal_attention(view), heads, 8, kernel, pool)
    np.testing.assert_allclose(scores[..., :-8], expected, atol=2e-6)
    assert (scores[..., -8:] > scores[..., :-8].max()).all()


def test_max_pooling_comes_before_the_group_mean(
    make_view: MakeView, causal_attention: Attention
) -> None:
    """The order matters: pooling the group mean would give other scores."""
    view = make_view(tokens=40, batch=1)
    attention = causal_attention(view)
    mean_first = attention.reshape(1, 2, 2, 40, 40).mean(axis=2)
    other = _reference(mean_first, 2, 8, 5, "max")
    scores = SnapKV(window=8, kernel=5, pool="max").score(view).numpy()[..., :-8]
    assert np.abs(scores - other).max() > 1e-3


@pytest.mark.parametrize(
    ("preset", "window", "kernel", "pool"),
    [("kvpress", 64, 5, "avg"), ("paper", 32, 7, "max"), ("official", 32, 5, "avg")],
)
@pytest.mark.parametrize("budget", [65, 80, 99])
def test_presets_keep_the_sets_of_the_published_formula(
    make_view: MakeView, causal_attention: Attention,
    preset: str, window: int, kernel: int, pool: str, budget: int,
) -> None:  # fmt: skip
    view = make_view(tokens=100, batch=1, budget=budget)
    before = _reference(causal_attention(view), 2, window, kernel, pool)
    if pool == "max":
        before += 1e-12 * np.arange(100 - window)  # plateaus of a maximum tie: newer first
    expected = np.concatenate([before, np.full((1, 2, window), before.max() + 1)], axis=-1)
    ranking = rank_tokens(SnapKV(**SnapKV.presets[preset]).score(view))
    for head in range(2):
        kept = np.argsort(-expected[0, head], kind="stable")[:budget]
        assert set(ranking[0, head, :budget].tolist()) == set(kept.tolist())


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


def test_only_the_window_of_the_queries_is_read(make_view: MakeView) -> None:
    """More queries than the window, or exactly the declared ones, give the same scores."""
    view = make_view(tokens=50)
    assert view.queries is not None
    scorer = SnapKV(window=8)
    assert scorer.needs.queries == 8
    recent = replace(view, queries=view.queries[:, :, -8:])
    assert torch.equal(scorer.score(view), scorer.score(recent))


def test_ties_of_identical_keys_go_to_the_newer_token(make_view: MakeView) -> None:
    view = make_view(tokens=30)
    view.keys[:] = view.keys[:, :, :1]
    ranking = rank_tokens(SnapKV(window=8, kernel=5, pool="max").score(view))
    assert ranking[0, 0].tolist() == list(range(29, -1, -1))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"window": 0}, "snapkv: window must be an integer >= 1 or auto, got 0"),
        ({"window": "wide"}, "snapkv: window must be"),
        ({"kernel": 4}, "snapkv: kernel must be odd, got 4"),
        ({"kernel": 0}, "snapkv: kernel must be an integer >= 1"),
        ({"pool": "min"}, "snapkv: pool must be one of max, avg, got 'min'"),
    ],
)
def test_bad_options_are_usage_errors(options: dict[str, str], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        SnapKV(**options)  # type: ignore[arg-type]
