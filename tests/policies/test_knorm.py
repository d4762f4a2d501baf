"""K-Norm against NumPy, and under RoPE."""

from __future__ import annotations

from collections.abc import Callable

import torch

from kvp.scoring import View
from policies.knorm import KNorm

MakeView = Callable[..., View]


def test_bfloat16_keys_do_not_tie(make_view: MakeView) -> None:
    """Norms computed in bfloat16 would collide for most tokens."""
    scores = KNorm().score(make_view(tokens=500, batch=1, heads=1, dtype=torch.bfloat16))
    assert len(scores.unique()) > 490
