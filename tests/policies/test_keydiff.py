"""KeyDiff by hand, and under RoPE; `tests/golden` computes the scores again."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from kvp.scoring import View
from policies.keydiff import KeyDiff

MakeView = Callable[..., View]


def test_by_hand(make_view: MakeView) -> None:
    """Directions (1,0), (1,0), (0,1): anchor (2,1)/3, cosines 2, 2, 1 over sqrt(5)."""
    view = make_view(tokens=3, batch=1, heads=1, width=2)
    keys = torch.tensor([[[[1.0, 0.0], [7.0, 0.0], [0.0, 0.5]]]])
    scores = KeyDiff().score(replace(view, keys=keys))
    expected = -torch.tensor([2.0, 2.0, 1.0]) / 5**0.5
    torch.testing.assert_close(scores[0, 0], expected)


def test_zero_and_opposite_keys_stay_finite(make_view: MakeView) -> None:
    view = make_view(tokens=4, batch=1, heads=1)
    view.keys[0, 0] = 0
    assert torch.equal(KeyDiff().score(view), torch.zeros(1, 1, 4))
    view.keys[0, 0, 0, 0], view.keys[0, 0, 1, 0] = 1, -1
    assert torch.isfinite(KeyDiff().score(view)).all()
