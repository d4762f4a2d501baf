"""The question stays; the rest is drawn as `random` draws it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from kvp.ranking import keep_tokens, rank_tokens
from kvp.scoring import View
from policies.random import Random
from policies.random_pinned import RandomPinned

MakeView = Callable[..., View]


def test_the_question_comes_first_and_the_rest_is_random(make_view: MakeView) -> None:
    view = replace(make_view(tokens=30), question=5)
    ranking, plain = rank_tokens(RandomPinned().score(view)), rank_tokens(Random().score(view))
    assert ranking[0, 0, :5].tolist() == [29, 28, 27, 26, 25]
    for head in range(2):
        context = [token for token in plain[0, head].tolist() if token < 25]
        assert ranking[0, head, 5:].tolist() == context


def test_a_question_longer_than_the_budget_keeps_its_last_tokens(make_view: MakeView) -> None:
    view = replace(make_view(tokens=30), question=20)
    assert keep_tokens(RandomPinned().score(view), 4)[1, 0].tolist() == [26, 27, 28, 29]


@pytest.mark.parametrize("question", [0, 30, 99])
def test_nothing_or_everything_is_the_question(make_view: MakeView, question: int) -> None:
    view = replace(make_view(tokens=30), question=question)
    expected = Random(seed=2).score(view) if question == 0 else torch.full((2, 2, 30), 2.0)
    assert torch.equal(RandomPinned(seed=2).score(view), expected)
