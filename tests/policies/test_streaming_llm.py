"""StreamingLLM's ranking, written down by hand."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

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


def test_first_tokens_and_a_window_as_other_papers_call_it(make_view: MakeView) -> None:
    """Budget 12, the last 5 tokens, the first 7."""
    view = make_view(tokens=40, budget=12)
    ranking = rank_tokens(StreamingLLM(n_sink=7, keep_recents=False).score(view))
    assert set(ranking[0, 0, :12].tolist()) == {*range(7), *range(35, 40)}
