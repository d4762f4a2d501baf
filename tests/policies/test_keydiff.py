"""KeyDiff by hand, and under RoPE; `tests/golden` computes the scores again."""

from __future__ import annotations

from collections.abc import Callable

import torch

from kvp.scoring import View
from policies.keydiff import KeyDiff

MakeView = Callable[..., View]


def test_zero_and_opposite_keys_stay_finite(make_view: MakeView) -> None:
    view = make_view(tokens=4, batch=1, heads=1)
    view.keys[0, 0] = 0
    assert torch.equal(KeyDiff().score(view), torch.zeros(1, 1, 4))
    view.keys[0, 0, 0, 0], view.keys[0, 0, 1, 0] = 1, -1
    assert torch.isfinite(KeyDiff().score(view)).all()
