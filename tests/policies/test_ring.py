"""The ring's tokens, those of a buffer that is written round and round."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from kvp.ranking import Protection, keep_tokens, rank_tokens
from kvp.scoring import View
from policies.ring import Ring
from policies.streaming_llm import StreamingLLM

MakeView = Callable[..., View]


@pytest.mark.parametrize("tokens", [1, 7, 8, 9, 40])
def test_the_newest_token_overwrites_the_oldest(make_view: MakeView, tokens: int) -> None:
    buffer = [-1] * 8
    for token in range(tokens):
        buffer[token % 8] = token
    ranking = rank_tokens(Ring().score(make_view(tokens=tokens)))
    assert {*ranking[1, 1, :8].tolist()} == {token for token in buffer if token >= 0}


def test_protected_it_keeps_what_streaming_llm_keeps(make_view: MakeView) -> None:
    view, protection = make_view(tokens=60, budget=30), Protection(sinks=4, recents=16)
    ring, streaming = (
        keep_tokens(scorer.score(view), 30, protection) for scorer in (Ring(), StreamingLLM())
    )
    assert torch.equal(ring, streaming)
