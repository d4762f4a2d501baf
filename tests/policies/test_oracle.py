"""The oracle hands the future through, and its ranking is optimal at every budget."""

from __future__ import annotations

from collections.abc import Callable

import torch

from kvp.scoring import View
from policies.oracle import Oracle

MakeView = Callable[..., View]


def test_scores_are_the_future_attention(make_view: MakeView) -> None:
    view = make_view(tokens=9)
    assert view.future is not None
    assert Oracle().needs.future
    assert torch.equal(Oracle().score(view), view.future)
