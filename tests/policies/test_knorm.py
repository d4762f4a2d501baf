"""K-Norm against NumPy, and under RoPE."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from kvp.scoring import View
from policies.knorm import KNorm

MakeView = Callable[..., View]


def test_bfloat16_keys_do_not_tie(make_view: MakeView) -> None:
    """Norms computed in bfloat16 would collide for most tokens."""
    scores = KNorm().score(make_view(tokens=500, batch=1, heads=1, dtype=torch.bfloat16))
    assert len(scores.unique()) > 490


def test_rotary_embedding_changes_nothing(make_view: MakeView) -> None:
    view = make_view(tokens=40)
    frequencies = 100.0 ** (-torch.arange(4) / 4)
    angle = torch.arange(40)[:, None] * frequencies
    first, second = view.keys.chunk(2, dim=-1)
    rotated = torch.cat(
        [first * angle.cos() - second * angle.sin(), second * angle.cos() + first * angle.sin()], -1
    )
    turned = KNorm().score(replace(view, keys=rotated))
    torch.testing.assert_close(turned, KNorm().score(view), rtol=1e-5, atol=1e-5)
