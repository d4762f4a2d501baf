"""One draw per layer: all heads lose the same tokens."""

from __future__ import annotations

from collections.abc import Callable

import torch

from kvp.scoring import View
from policies.random import Random
from policies.random_per_layer import RandomPerLayer

MakeView = Callable[..., View]


def test_heads_and_rows_agree_and_layers_differ(make_view: MakeView) -> None:
    view = make_view(tokens=30, heads=3, layer=0)
    scores = RandomPerLayer().score(view)
    assert scores.shape == (2, 3, 30)
    assert bool((scores == scores[0, 0]).all())
    assert torch.equal(scores[:, 0], Random().score(view)[:, 0])
    other = RandomPerLayer().score(make_view(tokens=30, heads=3, layer=1))
    assert not torch.equal(scores, other)
    assert not torch.equal(scores, RandomPerLayer(seed=1).score(view))
