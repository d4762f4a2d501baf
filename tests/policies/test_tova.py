"""TOVA: the forced last token and options; `tests/golden` computes the scores again."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from kvp.scoring import View
from policies.tova import TOVA

MakeView = Callable[..., View]


def test_forcing_leaves_the_other_scores_alone(make_view: MakeView) -> None:
    view = make_view(tokens=12)
    free, forced = TOVA().score(view), TOVA(force_last=True).score(view)
    assert torch.equal(free[..., :-1], forced[..., :-1])
    assert (forced[..., -1] > free.max()).all()


def test_one_query_is_enough(make_view: MakeView) -> None:
    view = make_view(tokens=12)
    assert view.queries is not None
    assert TOVA().needs.queries == 1
    last = replace(view, queries=view.queries[:, :, -1:])
    assert torch.equal(TOVA().score(view), TOVA().score(last))
