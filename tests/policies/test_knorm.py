"""K-Norm against NumPy, and under RoPE."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch

from kvp.scoring import View
from policies.knorm import KNorm

MakeView = Callable[..., View]


@pytest.mark.parametrize("tokens", [1, 2, 50])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_minus_the_key_norm(make_view: MakeView, tokens: int, dtype: torch.dtype) -> None:
    view = make_view(tokens=tokens, dtype=dtype)
    keys = view.keys.double().numpy()
    expected = -np.sqrt((keys**2).sum(axis=-1))
    np.testing.assert_allclose(KNorm().score(view).numpy(), expected, rtol=2e-6)


def test_bfloat16_keys_do_not_tie(make_view: MakeView) -> None:
    """Norms computed in bfloat16 would collide for most tokens."""
    scores = KNorm().score(make_view(tokens=500, batch=1, heads=1, dtype=torch.bfloat16))
    assert len(scores.unique()) > 490


def test_a_zero_key_is_kept_first(make_view: MakeView) -> None:
    view = make_view(tokens=6)
    view.keys[:, :, 2] = 0
    assert (KNorm().score(view).argmax(dim=-1) == 2).all()


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
