"""The largest amount that fits, whatever a unit costs."""

from __future__ import annotations

from itertools import accumulate

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvp.data.encode import largest
from kvp.errors import UsageError


@given(
    costs=st.lists(st.integers(1, 40), min_size=60, max_size=60),
    smallest=st.integers(0, 5),
    before=st.integers(0, 30),
    limit=st.integers(0, 60),
)
def test_one_more_would_not_fit(costs: list[int], smallest: int, before: int, limit: int) -> None:
    totals = [before, *(before + cost for cost in accumulate(costs))]
    limit += totals[smallest]
    amount = largest(
        lambda units: units, totals.__getitem__, limit=min(limit, totals[59]), smallest=smallest,
        what="t",
    )  # fmt: skip
    assert totals[amount] <= min(limit, totals[59]) < totals[amount + 1]


def test_few_texts_are_tried() -> None:
    tried: list[int] = []

    def make(amount: int) -> int:
        tried.append(amount)
        return amount

    assert largest(make, lambda units: 50 + 7 * units, limit=131_072, smallest=0, what="t") == 18717
    assert len(tried) < 20
    assert max(tried) < 19_000


def test_a_length_below_the_smallest_is_refused() -> None:
    with pytest.raises(UsageError, match="--length 9: the smallest kv prompt already has 10"):
        largest(lambda units: units, lambda units: 10 + units, limit=9, smallest=0, what="kv")
