from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvp.ranking import UNPROTECTED, Protection, keep_tokens, protected_order, rank_tokens


def test_higher_scores_first_and_ties_go_to_the_newer_token() -> None:
    scores = torch.tensor([1.0, 3.0, 1.0, 2.0, 1.0])
    assert rank_tokens(scores).tolist() == [1, 3, 4, 2, 0]
    assert rank_tokens(torch.zeros(5)).tolist() == [4, 3, 2, 1, 0]


def test_protected_tokens_alternate_newest_and_sinks() -> None:
    assert protected_order(10, Protection(sinks=2, recents=3)) == [9, 0, 8, 1, 7]
    assert protected_order(10, Protection(sinks=3, recents=1)) == [9, 0, 1, 2]
    assert protected_order(10, UNPROTECTED) == []


def test_protected_tier_precedes_everything_even_infinite_scores() -> None:
    scores = torch.tensor([0.0, 9.0, torch.inf, 5.0, 0.0, -torch.inf])
    ranking = rank_tokens(scores, Protection(sinks=1, recents=2))
    assert ranking.tolist() == [5, 0, 4, 2, 1, 3]


def test_kept_tokens_are_ascending_prefixes_of_the_ranking() -> None:
    scores = torch.tensor([[0.0, 2.0, 1.0, 3.0], [3.0, 1.0, 2.0, 0.0]])
    assert keep_tokens(scores, 2).tolist() == [[1, 3], [0, 2]]
    assert keep_tokens(scores, 1, Protection(sinks=0, recents=1)).tolist() == [[3], [3]]


@pytest.mark.parametrize("budget", [4, 5, 1000])
def test_a_budget_of_the_whole_cache_keeps_everything(budget: int) -> None:
    assert keep_tokens(torch.randn(2, 4), budget, Protection()).tolist() == [[0, 1, 2, 3]] * 2


@given(
    scores=st.lists(st.integers(-3, 3), min_size=1, max_size=30),
    sinks=st.integers(0, 6),
    recents=st.integers(0, 6),
)
@settings(max_examples=100, deadline=None)
def test_ranking_equals_a_plain_sort(scores: list[int], sinks: int, recents: int) -> None:
    tokens = len(scores)
    protection = Protection(sinks=sinks, recents=recents)

    def order(token: int) -> tuple[float, ...]:
        """Protected tokens by their turn (newest, first, next newest, ...), others by score."""
        turns = [(tokens - 1 - token, 0)] if token >= tokens - recents else []
        turns += [(token, 1)] if token < sinks else []
        return (0, *min(turns)) if turns else (1, -scores[token], -token)

    expected = sorted(range(tokens), key=order)
    assert rank_tokens(torch.tensor(scores).float(), protection).tolist() == expected


def test_negative_protection_is_refused() -> None:
    with pytest.raises(ValueError, match="negative"):
        Protection(sinks=-1)
    assert Protection().tokens == 20
