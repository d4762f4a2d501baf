"""GVote's draws, sizes and edges; its votes are computed a second time in `tests/golden`."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from kvp.ranking import rank_tokens
from kvp.scoring import HiddenStates, sizes_of
from policies.gvote import GVote


def test_the_prefix_of_its_size_is_its_set(make_view):
    view = make_view(tokens=60, batch=1)
    scorer = GVote(p_nuc=0.6, samples=4)
    assert sizes_of(scorer) is not None
    scores = scorer.score(view)
    votes = scores.floor().numpy()
    sizes, ranking = scorer.sizes(scores), rank_tokens(scores)
    for head in range(2):
        assert 4 <= sizes[0, head] < 60
        chosen = set(ranking[0, head, : int(sizes[0, head])].tolist())
        assert chosen == set(np.flatnonzero(votes[0, head]).tolist())


def test_query_draws_follow_the_queries_before_rope(make_view):
    """Mean and covariance of many guesses, future 1 so that the rotation is a rotation."""
    view = make_view(tokens=30, batch=1, heads=1, group=2, width=4)
    plain = view.rope.unrotate(view.queries, torch.arange(30))[0, :, 4:].double().numpy()
    scorer = GVote(space="query", samples=3000, future=1)
    guesses = torch.stack([guess[0] for guess in scorer.sample_queries(view)], dim=1)
    back = view.rope.unrotate(guesses, torch.full((3000,), 30)).double().numpy()
    for head in range(2):
        np.testing.assert_allclose(back[head].mean(0), plain[head].mean(0), atol=0.2)
        expected = np.cov(plain[head].T, bias=True)
        np.testing.assert_allclose(np.cov(back[head].T), expected, atol=0.15 * expected.max())


def test_draws_depend_on_seed_and_layer_alone(make_view):
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


@pytest.mark.parametrize("tokens", [1, 3, 4])
def test_prompts_within_the_skipped_tokens_are_kept_whole(make_view, tokens):
    scorer = GVote()
    scores = scorer.score(make_view(tokens=tokens))
    assert (scorer.sizes(scores) == tokens).all()
    assert (GVote(min_keep=1).sizes(scores) == tokens).all()


def test_sure_heads_keep_the_minimum(make_view):
    """One key that every query likes: k = 1, so one token has all votes."""
    view = make_view(tokens=30, batch=1)
    view.keys[:] = 0.0
    view.keys[:, :, 7] = 50.0
    hidden = view.hidden
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
