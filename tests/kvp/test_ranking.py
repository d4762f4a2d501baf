"""Rankings, and from scores to the tokens that stay."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvp.budgets import parse_budget
from kvp.errors import UsageError
from kvp.ranking import (
    UNPROTECTED,
    Protection,
    Selection,
    apportion,
    kept_tokens,
    pooled_scores,
    rank_tokens,
    select,
)


def test_protected_tier_precedes_everything_even_infinite_scores():
    scores = torch.tensor([0.0, 9.0, torch.inf, 5.0, 0.0, -torch.inf])
    ranking = rank_tokens(scores, Protection(sinks=1, recents=2))
    assert ranking.tolist() == [5, 0, 4, 2, 1, 3]


@given(
    scores=st.lists(st.integers(-3, 3), min_size=1, max_size=30),
    sinks=st.integers(0, 6),
    recents=st.integers(0, 6),
)
@settings(max_examples=100, deadline=None)
def test_ranking_equals_a_plain_sort(scores, sinks, recents):
    tokens = len(scores)
    protection = Protection(sinks=sinks, recents=recents)

    def order(token):
        """Protected tokens by their turn (newest, first, next newest, ...), others by score."""
        turns = [(tokens - 1 - token, 0)] if token >= tokens - recents else []
        turns += [(token, 1)] if token < sinks else []
        return (0, *min(turns)) if turns else (1, -scores[token], -token)

    expected = sorted(range(tokens), key=order)
    assert rank_tokens(torch.tensor(scores).float(), protection).tolist() == expected


@pytest.mark.parametrize(
    ("pool", "expected"),
    [("mean", [1.0, 2.5, 4.5, math.inf]), ("max", [2.0, 4.0, 8.0, math.inf]),
     ("logsumexp", [math.log(1 + math.e**2), math.log(math.e**4 + math.e),
                    math.log(math.e + math.e**8), math.inf])],
)  # fmt: skip
def test_one_score_for_all_heads(pool, expected):
    scores = torch.tensor([[[0.0, 4.0, 1.0, math.inf]], [[2.0, 1.0, 8.0, math.inf]]])
    assert pooled_scores(scores, pool).tolist() == pytest.approx(expected)


def test_pools_take_what_scorers_give_and_refuse_other_names():
    scores = torch.tensor([[[-torch.inf, torch.inf, 0.0], [torch.inf, torch.inf, 0.0]]])
    assert pooled_scores(scores, "mean").tolist() == [0.0, math.inf, 0.0]
    assert pooled_scores(scores[:, :1], "logsumexp").isfinite().tolist() == [True, False, True]
    with pytest.raises(UsageError, match="pool must be one of logsumexp, mean, max, got 'sum'"):
        pooled_scores(scores, "sum")


SCORES = torch.tensor([[[0.0, 5.0, 1.0, 4.0, 3.0, 2.0]]])


def _selection(scores, protection, sizes=None):
    return Selection(scores, protection, None if sizes is None else lambda raised: sizes)


def test_kept_tokens_are_the_best_ones_in_order():
    selection = _selection(SCORES, UNPROTECTED)
    assert selection.tokens(3).tolist() == [[[1, 3, 4]]]
    assert selection.tokens(9).tolist() == [[[0, 1, 2, 3, 4, 5]]]
    protected = _selection(SCORES, Protection(sinks=1, recents=1))
    assert protected.tokens(3).tolist() == [[[0, 1, 5]]]


class _Fixed:
    """An allocator that remembers its request and gives what it was made with."""

    name = "fixed"

    def __init__(self, counts):
        self.counts = torch.tensor(counts)
        self.requests = []

    def allocate(self, request):
        self.requests.append(request)
        return self.counts


def test_allocated_heads_keep_their_own_numbers_of_tokens():
    scores = torch.stack([SCORES[0, 0], -SCORES[0, 0]])[None]
    rule = _Fixed([[1, 3]])
    sizes = torch.tensor([[5, 6]])
    selection = _selection(scores, Protection(sinks=1, recents=0), sizes)
    assert selection.tokens(2, rule).tolist() == [[[0, -1, -1], [0, 2, 5]]]
    (request,) = rule.requests
    assert (request.budget, request.floor, request.total) == (2, 1, 4)
    assert request.scores[..., 0].isinf().all()
    assert request.scores[..., 1:].isfinite().all()
    assert request.sizes is sizes


def test_counts_that_cannot_be_kept_are_refused():
    selection = _selection(SCORES, Protection(sinks=1, recents=1))
    for counts in ([[1]], [[7]], [[3, 3]]):
        with pytest.raises(UsageError, match="allocator fixed"):
            selection.tokens(3, _Fixed(counts))


def test_one_call_selects_for_many_prompts_where_there_is_no_allocator():
    scores = torch.rand(3, 2, 4, 9, generator=torch.Generator().manual_seed(0))
    protection = Protection(sinks=1, recents=2)
    together = select(scores, 5, protection)
    assert together.shape == (3, 2, 4, 5)
    assert torch.equal(together[:, 1], select(scores[:, 1], 5, protection))


@pytest.mark.parametrize(
    ("budget", "cached", "kept"),
    [("25%", 160, 40), ("25%", 40, 20), ("12.5%", 10, 10), ("64", 500, 64), ("64", 30, 30)],
)
def test_percentages_keep_the_protected_tokens_of_short_prompts(budget, cached, kept):
    assert kept_tokens(parse_budget(budget), cached, Protection()) == kept


def test_token_counts_below_the_protected_tokens_are_refused():
    with pytest.raises(UsageError, match=r"16 tokens, fewer than the 20 protected ones \(a perc"):
        kept_tokens(parse_budget("16"), 500, Protection())
    assert kept_tokens(parse_budget("16"), 12, Protection()) == 12
    assert kept_tokens(parse_budget("16"), 500, UNPROTECTED) == 16


@pytest.mark.parametrize("share", [math.nan, math.inf])
def test_shares_that_are_not_finite_are_refused(share):
    with pytest.raises(ValueError, match="protected tokens are infinite"):
        apportion(torch.tensor([1.0, share]), 8, minimum=1, maximum=7)
