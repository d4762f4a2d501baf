"""GVote against its algorithm in float64 NumPy, given the same draws."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch

from kvp.errors import UsageError
from kvp.ranking import rank_tokens
from kvp.scoring import ALL_QUERIES, HiddenStates, SelfSizing, View
from policies.gvote import GVote

MakeView = Callable[..., View]
Array = np.ndarray


def _watched(view: View) -> tuple[View, list[Array]]:
    """The view, and a list that collects the queries projected from every draw [B, Q, D]."""
    hidden, drawn = view.hidden, []
    assert hidden is not None

    def project(states: torch.Tensor) -> torch.Tensor:
        queries = hidden.project(states)
        drawn.extend(queries.double().numpy().transpose(2, 0, 1, 3))
        return queries

    watched = HiddenStates(mean=hidden.mean, variance=hidden.variance, project=project)
    return replace(view, hidden=watched), drawn


def _moved(queries: Array, view: View, future: int) -> Array:
    """Queries [..., D] averaged over rotations to the `future` positions after the cache."""
    assert view.rope is not None
    half = queries.shape[-1] // 2
    positions = np.arange(view.keys.shape[2], view.keys.shape[2] + future)
    turn = np.exp(1j * positions[:, None] * view.rope.frequencies.double().numpy()).mean(axis=0)
    pairs = (queries[..., :half] + 1j * queries[..., half:]) * turn
    return np.concatenate([pairs.real, pairs.imag], axis=-1)


def _softmax(logits: Array) -> Array:
    weights = np.exp(logits - logits.max())
    return weights / weights.sum()


def _top(values: Array, count: int) -> Array:
    mask = np.zeros(len(values), dtype=bool)
    mask[np.argsort(-values, kind="stable")[:count]] = True
    return mask


def _reference(
    view: View, drawn: list[Array], *, p_nuc: float = 0.95, include_current: bool = True,
    future: int = 512,
) -> tuple[Array, Array]:  # fmt: skip
    """Votes and mean attention of the guessed queries, [B, H, N] each."""
    assert view.queries is not None
    keys, last = view.keys.double().numpy(), view.queries[:, :, -1].double().numpy()
    batch, heads, tokens, width = keys.shape
    group = last.shape[1] // heads
    votes, attention = np.zeros((batch, heads, tokens)), np.zeros((batch, heads, tokens))
    for b in range(batch):
        for q in range(last.shape[1]):
            h = q // group
            current = _softmax(keys[b, h] @ last[b, q] / np.sqrt(width))
            held = np.cumsum(np.sort(current)[::-1])
            size = min(int(np.searchsorted(held, p_nuc)) + 1, tokens)
            if include_current:
                votes[b, h] += _top(current, size)
            for draw in drawn:
                logits = keys[b, h] @ _moved(draw[b, q], view, future) / np.sqrt(width)
                votes[b, h] += _top(logits, size)
                attention[b, h] += _softmax(logits) / (len(drawn) * group)
    return votes, attention


RATIOS = pytest.mark.parametrize(("heads", "group"), [(2, 1), (2, 2), (1, 7)])


@RATIOS
@pytest.mark.parametrize("tokens", [5, 6, 40])
@pytest.mark.parametrize(
    "options", [{}, {"p_nuc": 0.5, "samples": 3}, {"include_current": False, "future": 7}]
)
def test_votes_and_attention(
    make_view: MakeView, heads: int, group: int, tokens: int, options: dict[str, float]
) -> None:
    view, drawn = _watched(make_view(tokens=tokens, heads=heads, group=group))
    scorer = GVote(**options)  # type: ignore[arg-type]
    scores = scorer.score(view).numpy()
    assert len(drawn) == scorer.samples
    given = {name: value for name, value in options.items() if name != "samples"}
    votes, attention = _reference(view, drawn, **given)  # type: ignore[arg-type]
    np.testing.assert_array_equal(np.floor(scores), votes)
    # float32 resolves fractions of a score of up to 63 votes to 4e-6.
    np.testing.assert_allclose(scores - votes, np.minimum(attention, 1 - 2**-10), atol=1e-5)
    sizes = scorer.sizes(torch.from_numpy(scores))
    expected = np.maximum((votes > 0).sum(axis=-1), min(4, tokens))
    np.testing.assert_array_equal(sizes.numpy(), expected)


def test_the_prefix_of_its_size_is_its_set(make_view: MakeView) -> None:
    view, drawn = _watched(make_view(tokens=60, batch=1))
    scorer = GVote(p_nuc=0.6, samples=4)
    assert isinstance(scorer, SelfSizing)
    scores = scorer.score(view)
    votes, _ = _reference(view, drawn, p_nuc=0.6)
    sizes, ranking = scorer.sizes(scores), rank_tokens(scores)
    for head in range(2):
        assert 4 <= sizes[0, head] < 60
        chosen = set(ranking[0, head, : int(sizes[0, head])].tolist())
        assert chosen == set(np.flatnonzero(votes[0, head]).tolist())


@pytest.mark.parametrize("space", ["hidden", "query"])
def test_sets_grow_with_p_and_with_samples(make_view: MakeView, space: str) -> None:
    view = make_view(tokens=80)
    before = torch.zeros(2, 2, 80, dtype=torch.bool)
    for p_nuc in (0.0, 0.3, 0.7, 0.95, 0.999, 1.0):
        chosen = GVote(p_nuc=p_nuc, space=space).score(view) >= 1
        assert (chosen | ~before).all()
        before = chosen
    before[...] = False
    for samples in (1, 2, 3, 8, 17):
        chosen = GVote(p_nuc=0.5, samples=samples, space=space).score(view) >= 1
        assert (chosen | ~before).all()
        before = chosen
    paper = GVote(**GVote.presets["paper"], space=space).score(view) >= 1  # type: ignore[arg-type]
    assert (~paper | (GVote(space=space).score(view) >= 1)).all()


def test_hidden_draws_follow_mean_and_variance(make_view: MakeView) -> None:
    """Far draws: a projection that hands out the states themselves shows them."""
    view = make_view(tokens=20, batch=1, heads=1, group=1, width=6)
    seen: list[torch.Tensor] = []

    def project(states: torch.Tensor) -> torch.Tensor:
        seen.append(states[:, 0])
        return states[:, None]

    mean, variance = torch.arange(6.0)[None], torch.tensor([[0.0, 1, 4, 9, 16, 25]])
    hidden = HiddenStates(mean=mean, variance=variance, project=project)
    GVote(samples=400).score(replace(view, hidden=hidden))
    draws = torch.cat(seen)
    assert (draws[:, 0] == 0).all()
    error = (draws.mean(0) - mean[0]) / (variance[0].sqrt() / 20).clamp_min(1e-9)
    assert error.abs().max() < 4
    np.testing.assert_allclose(draws[:, 1:].std(0), [1, 2, 3, 4, 5], rtol=0.15)


def test_query_draws_follow_the_queries_before_rope(make_view: MakeView) -> None:
    """Mean and covariance of many guesses, future 1 so that the rotation is a rotation."""
    view = make_view(tokens=30, batch=1, heads=1, group=2, width=4)
    assert view.queries is not None
    assert view.rope is not None
    plain = view.rope.unrotate(view.queries, torch.arange(30))[0, :, 4:].double().numpy()
    scorer = GVote(space="query", samples=3000, future=1)
    guesses = torch.stack([guess[0] for guess in scorer.guesses(view)], dim=1)
    back = view.rope.unrotate(guesses, torch.full((3000,), 30)).double().numpy()
    for head in range(2):
        np.testing.assert_allclose(back[head].mean(0), plain[head].mean(0), atol=0.2)
        expected = np.cov(plain[head].T, bias=True)
        np.testing.assert_allclose(np.cov(back[head].T), expected, atol=0.15 * expected.max())


def test_draws_depend_on_seed_and_layer_alone(make_view: MakeView) -> None:
    view = make_view(tokens=50)
    scorer = GVote(p_nuc=0.5)
    first = scorer.score(view)
    scorer.score(replace(view, layer=5))
    torch.manual_seed(99)
    assert torch.equal(first, scorer.score(view))
    assert not torch.equal(first, scorer.score(replace(view, layer=2)))
    assert not torch.equal(first, GVote(p_nuc=0.5, seed=1).score(view))
    with_rows = replace(view, budget=3)
    assert torch.equal(first, scorer.score(with_rows))


def test_flat_attention_keeps_everything(make_view: MakeView) -> None:
    view = make_view(tokens=30)
    view.keys[:] = 1.0
    scorer = GVote(p_nuc=1.0)
    scores = scorer.score(view)
    assert (scorer.sizes(scores) == 30).all()
    assert rank_tokens(scores)[0, 0].tolist() == list(range(29, -1, -1))


def test_ties_go_to_the_newer_token(make_view: MakeView) -> None:
    view = make_view(tokens=30)
    view.keys[:] = 1.0
    chosen = GVote(p_nuc=0.49).score(view) >= 1
    assert chosen[..., 15:].all()
    assert not chosen[..., :15].any()


@pytest.mark.parametrize("tokens", [1, 3, 4])
def test_prompts_within_the_skipped_tokens_are_kept_whole(make_view: MakeView, tokens: int) -> None:
    scorer = GVote()
    scores = scorer.score(make_view(tokens=tokens))
    assert (scorer.sizes(scores) == tokens).all()
    assert (GVote(min_keep=1).sizes(scores) == tokens).all()


def test_sure_heads_keep_the_minimum(make_view: MakeView) -> None:
    """One key that every query likes: k = 1, so one token has all votes."""
    view = make_view(tokens=30, batch=1)
    view.keys[:] = 0.0
    view.keys[:, :, 7] = 50.0
    hidden = view.hidden
    assert hidden is not None
    assert view.queries is not None
    view.queries[:] = 1.0
    # Positive channels stay positive on average: the rotation over one position near 0 turns them.
    certain = replace(
        view,
        positions=view.positions - 30,
        hidden=HiddenStates(
            mean=hidden.mean, variance=hidden.variance,
            project=lambda states: torch.ones(1, 4, states.shape[1], 8),
        ),
    )  # fmt: skip
    scores = GVote(future=1).score(certain)
    assert ((scores >= 1).sum(dim=-1) == 1).all()
    assert (GVote(future=1).sizes(scores) == 4).all()
    assert (GVote(future=1, min_keep=1).sizes(scores) == 1).all()


def test_needs_and_what_is_missing(make_view: MakeView) -> None:
    needs = GVote(n_skip=7).needs
    assert (needs.queries, needs.rope, needs.hidden_after) == (1, True, 7)
    needs = GVote(space="query").needs
    assert (needs.queries, needs.rope, needs.hidden_after) == (ALL_QUERIES, True, None)
    view = make_view(tokens=30)
    with pytest.raises(UsageError, match=r"no statistics of hidden states.*gvote\(space=query\)"):
        GVote().score(replace(view, hidden=None))
    with pytest.raises(UsageError, match="gvote: this view carries no rotary embedding"):
        GVote().score(replace(view, rope=None))
    assert torch.isfinite(GVote(space="query").score(replace(view, hidden=None))).all()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"p_nuc": 1.5}, "gvote: p_nuc must be a number from 0 to 1, got 1.5"),
        ({"samples": 0}, "samples must be an integer >= 1"),
        ({"n_skip": -1}, "n_skip must be an integer >= 0"),
        ({"future": 0}, "future must be an integer >= 1"),
        ({"min_keep": 0}, "min_keep must be an integer >= 1"),
        ({"space": "value"}, "space must be one of hidden, query"),
        ({"include_current": "no"}, "include_current must be one of true, false"),
        ({"seed": -1}, "seed must be an integer >= 0"),
    ],
)
def test_bad_options_are_usage_errors(options: dict[str, object], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        GVote(**options)  # type: ignore[arg-type]
