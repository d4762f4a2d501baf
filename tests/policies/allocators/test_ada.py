"""AdaKV: ties, protection, roundings; `tests/golden` has kvpress's form and random scores."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from kvp.ranking import Protection, Request
from policies.allocators.ada import Ada
from policies.registry import make_allocator

RequestOf = Callable[..., Request]
STRONG, WEAK = [0.9, 0.8, 0.7, 0.6, 0.5, 0.4], [0.3, 0.2, 0.1, 0.05, 0.04, 0.03]


def test_ties_go_to_the_newer_token_then_to_the_lower_head(request_of: RequestOf) -> None:
    allocator = Ada(safeguard=0.5)  # one token each, three of the six are won
    lower_head = [[[1, 1, 5], [1, 1, 5], [9, 9, 9]]]
    assert allocator.allocate(request_of(lower_head, 2)).tolist() == [[2, 1, 3]]
    newer = [[[1, 0, 5], [0, 1, 5], [9, 9, 9]]]
    assert allocator.allocate(request_of(newer, 2)).tolist() == [[1, 2, 3]]


def test_protected_tokens_count_inside_and_do_not_compete_twice(request_of: RequestOf) -> None:
    protection = Protection(sinks=1, recents=1)
    request = request_of([[STRONG, WEAK]], 3, protection)
    # Tokens 0 and 5 of both, then the best of .8 .7 .6 .5 and .2 .1 .05 .04 twice.
    assert Ada(safeguard=0.0).allocate(request).tolist() == [[4, 2]]


def wins(counts: list[int], tokens: int = 10) -> list[list[list[float]]]:
    """A layer whose heads win so many of the best sum(counts) tokens."""
    return [[[2.0] * count + [1.0] * (tokens - count) for count in counts]]


@pytest.mark.parametrize(
    ("won", "counts"),
    [
        ([7, 1], [6, 2]),  # 3.5 + 2 and 0.5 + 2, halves to even
        ([6, 2], [5, 3]),
        ([5, 5, 2], [4, 4, 3]),  # twice 4.5: one token of 12 is lost
    ],
)
def test_the_published_rounding_by_hand(
    request_of: RequestOf, won: list[int], counts: list[int]
) -> None:
    allocator = make_allocator("ada:paper")
    assert allocator == Ada(safeguard=0.5, rule="paper")
    assert allocator.allocate(request_of(wins(won), 4)).tolist() == [counts]


def test_the_published_rule_leaves_protected_tokens_aside(request_of: RequestOf) -> None:
    # Without its 2 protected tokens a head has 4; the middle tokens win 7 and 1.
    layer = [[[0, *row, 0] for row in wins([7, 1])[0]]]
    request = request_of(layer, 6, Protection(sinks=1, recents=1))
    assert Ada(safeguard=0.5, rule="paper").allocate(request).tolist() == [[2 + 6, 2 + 2]]
