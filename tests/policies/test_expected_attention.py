"""Expected Attention: rotary variants, edges and options; `tests/golden` has the scores."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch

from kvp.errors import UsageError
from kvp.ranking import rank_tokens
from kvp.rope import Rope
from kvp.scoring import ALL_QUERIES, View
from policies.expected_attention import ExpectedAttention

MakeView = Callable[..., View]
Array = np.ndarray


def _matrix(position: float, frequencies: Array, width: int, scaling: float = 1.0) -> Array:
    """The rotary embedding of one position as a [D, D] matrix acting on column vectors."""
    half = len(frequencies)
    matrix = np.eye(width)
    for i, frequency in enumerate(frequencies):
        cosine, sine = np.cos(position * frequency), np.sin(position * frequency)
        matrix[[i, i, half + i, half + i], [i, half + i, i, half + i]] = [
            scaling * cosine, -scaling * sine, scaling * sine, scaling * cosine,
        ]  # fmt: skip
    return matrix


def _reference(view: View, *, future: int = 512, sinks: int = 4) -> Array:
    """Scores of the tokens from `sinks` on: [B, H, N - sinks]."""
    assert view.queries is not None
    assert view.rope is not None
    frequencies = view.rope.frequencies.double().numpy()
    queries, keys = view.queries.double().numpy(), view.keys.double().numpy()
    norms = np.linalg.norm(view.values.double().numpy(), axis=-1)
    batch, heads, tokens, width = keys.shape
    group = queries.shape[1] // heads
    scaling = view.rope.scaling
    turns = [_matrix(p, frequencies, width, scaling) for p in range(tokens + future)]
    mean_turn = np.mean(turns[tokens:], axis=0)
    scores = np.zeros((batch, heads, tokens - sinks))
    for b in range(batch):
        for q in range(queries.shape[1]):
            plain = [np.linalg.solve(turns[j], queries[b, q, j]) for j in range(sinks, tokens)]
            mu = mean_turn @ np.mean(plain, axis=0)
            spread = mean_turn @ np.cov(np.transpose(plain), bias=True) @ mean_turn.T
            z = np.array(
                [
                    k @ mu / np.sqrt(width) + (k @ spread @ k) / (2 * width)
                    for k in keys[b, q // group, sinks:]
                ]
            )
            weights = np.exp(z - z.max())
            scores[b, q // group] += weights / weights.sum() / group
    return scores * norms[..., sinks:]


@pytest.mark.parametrize("scaling", [1.0, 1.3])
def test_partial_rotary_width_and_scaling(make_view: MakeView, scaling: float) -> None:
    view = make_view(tokens=30, batch=1)
    rope = Rope(frequencies=torch.tensor([1.0, 0.2]), scaling=scaling)
    view = replace(view, rope=rope)
    scores = ExpectedAttention(epsilon=0.0).score(view).numpy()
    np.testing.assert_allclose(scores[..., 4:], _reference(view), rtol=2e-3, atol=1e-5)


@pytest.mark.parametrize("tokens", [1, 3, 4])
def test_prompts_of_sinks_alone_are_ranked_by_recency(make_view: MakeView, tokens: int) -> None:
    ranking = rank_tokens(ExpectedAttention().score(make_view(tokens=tokens)))
    assert ranking[0, 0].tolist() == list(range(tokens - 1, -1, -1))


def test_positions_need_not_start_at_zero(make_view: MakeView) -> None:
    """Moving all tokens and their queries by the same distance changes nothing."""
    view = make_view(tokens=30)
    assert view.rope is not None
    assert view.queries is not None
    shift = view.rope.rotation(torch.tensor([17]))
    moved = replace(
        view,
        positions=view.positions + 17,
        keys=view.rope.rotate(view.keys, *shift),
        queries=view.rope.rotate(view.queries, *shift),
    )
    scorer = ExpectedAttention()
    torch.testing.assert_close(scorer.score(moved), scorer.score(view), rtol=1e-3, atol=1e-5)


def test_needs_and_what_is_missing(make_view: MakeView) -> None:
    needs = ExpectedAttention().needs
    assert needs.queries == ALL_QUERIES
    assert needs.rope
    assert needs.hidden_after is None
    with pytest.raises(UsageError, match="expected_attention: this view carries no rotary"):
        ExpectedAttention().score(replace(make_view(tokens=9), rope=None))
