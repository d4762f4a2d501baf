"""KeyDiff against NumPy, and under RoPE."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch

from kvp.scoring import View
from policies.keydiff import KeyDiff

MakeView = Callable[..., View]


@pytest.mark.parametrize("tokens", [1, 2, 50])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_minus_the_cosine_to_the_mean_direction(
    make_view: MakeView, tokens: int, dtype: torch.dtype
) -> None:
    view = make_view(tokens=tokens, dtype=dtype)
    keys = view.keys.double().numpy()
    expected = np.empty(keys.shape[:3])
    for row in range(2):
        for head in range(2):
            k = keys[row, head]
            anchor = np.mean([key / np.linalg.norm(key) for key in k], axis=0)
            for i, key in enumerate(k):
                expected[row, head, i] = -(key @ anchor) / (
                    np.linalg.norm(key) * np.linalg.norm(anchor)
                )
    np.testing.assert_allclose(KeyDiff().score(view).numpy(), expected, atol=2e-6)


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


def test_rotary_embedding_changes_the_ranking(make_view: MakeView) -> None:
    view = make_view(tokens=40)
    angle = torch.arange(40)[:, None] * 100.0 ** (-torch.arange(4) / 4)
    first, second = view.keys.chunk(2, dim=-1)
    rotated = torch.cat(
        [first * angle.cos() - second * angle.sin(), second * angle.cos() + first * angle.sin()], -1
    )
    before, after = KeyDiff().score(view), KeyDiff().score(replace(view, keys=rotated))
    assert not torch.equal(before.argsort(dim=-1), after.argsort(dim=-1))
