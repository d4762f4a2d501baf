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


@pytest.mark.parametrize("budget", [1, 3, 4, 5, 7, 20])
def test_kvpress_preset_keeps_sinks_first(make_view: MakeView, budget: int) -> None:
    """Its survivors tie, so where the budget cuts among the sinks any of them are its set."""
    view = make_view(tokens=40, budget=budget)
    ranking = rank_tokens(StreamingLLM(**StreamingLLM.presets["kvpress"]).score(view))
    kept = set(ranking[0, 0, :budget].tolist())
    survivors = set(range(40)) - set(range(4, 4 + 40 - budget))
    assert kept <= survivors
    assert budget < 4 or kept == survivors


def test_first_tokens_and_a_window_as_other_papers_call_it(make_view: MakeView) -> None:
    """Budget 12, the last 5 tokens, the first 7."""
    view = make_view(tokens=40, budget=12)
    ranking = rank_tokens(StreamingLLM(n_sink=7, keep_recents=False).score(view))
    assert set(ranking[0, 0, :12].tolist()) == {*range(7), *range(35, 40)}


def test_negative_sinks_are_a_usage_error() -> None:
    with pytest.raises(UsageError, match="streaming_llm: n_sink must be an integer >= 0, got -1"):
        StreamingLLM(n_sink=-1)
    with pytest.raises(UsageError, match="keep_recents must be one of true, false"):
        StreamingLLM(keep_recents=1)  # type: ignore[arg-type]
