"""StreamingLLM's ranking, written down by hand."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from kvp.errors import UsageError
from kvp.ranking import rank_tokens
from kvp.scoring import View
from policies.streaming_llm import StreamingLLM

MakeView = Callable[..., View]


@pytest.mark.parametrize(
    ("tokens", "budget", "n_sink", "expected"),
    [
        (8, 8, 4, [0, 1, 2, 3, 7, 6, 5, 4]),
        (8, 8, 0, [7, 6, 5, 4, 3, 2, 1, 0]),
        (8, 5, 4, [0, 1, 7, 6, 5, 4, 3, 2]),
        (8, 1, 4, [7, 6, 5, 4, 3, 2, 1, 0]),
        (3, 100, 4, [0, 1, 2]),
        (1, 4, 4, [0]),
    ],
)
def test_sinks_then_recency(
    make_view: MakeView, tokens: int, budget: int, n_sink: int, expected: list[int]
) -> None:
    view = make_view(tokens=tokens, budget=budget)
    ranking = rank_tokens(StreamingLLM(n_sink=n_sink).score(view))
    assert torch.equal(ranking, torch.tensor(expected).expand(2, 2, -1))


@pytest.mark.parametrize("tokens", [40, 100])
@pytest.mark.parametrize("budget", [9, 20, 39])
def test_kept_set_is_the_published_one(make_view: MakeView, tokens: int, budget: int) -> None:
    """Score 1 except for the tokens 4 .. 4 + pruned - 1, as kvpress builds it."""
    view = make_view(tokens=tokens, budget=budget)
    kept = set(rank_tokens(StreamingLLM().score(view))[0, 0, :budget].tolist())
    assert kept == set(range(tokens)) - set(range(4, 4 + tokens - budget))


def test_negative_sinks_are_a_usage_error() -> None:
    with pytest.raises(UsageError, match="streaming_llm: n_sink must be an integer >= 0, got -1"):
        StreamingLLM(n_sink=-1)
