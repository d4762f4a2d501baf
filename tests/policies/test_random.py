"""Random scores depend on (seed, layer, head, tokens) and on nothing else."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from kvp.scoring import View
from policies.random import Random

MakeView = Callable[..., View]


def test_call_order_batch_and_content_do_not_matter(make_view: MakeView) -> None:
    first, second = make_view(tokens=30, layer=0), make_view(tokens=30, layer=1)
    forward = [Random().score(first), Random().score(second)]
    backward = [Random().score(second), Random().score(first)][::-1]
    assert all(torch.equal(a, b) for a, b in zip(forward, backward, strict=True))
    other = make_view(tokens=30, layer=0, seed=9, batch=1)
    assert torch.equal(Random().score(other), forward[0][:1])


def test_seed_layer_head_and_length_change_the_draw(make_view: MakeView) -> None:
    view = make_view(tokens=30)
    base = Random().score(view)
    assert not torch.equal(base, Random(seed=1).score(view))
    assert not torch.equal(base, Random().score(replace(view, layer=2)))
    assert not torch.equal(base[:, 0], base[:, 1])
    assert not torch.equal(base[..., :29], Random().score(make_view(tokens=29)))


def test_global_generator_is_neither_read_nor_advanced(make_view: MakeView) -> None:
    view = make_view(tokens=10)
    torch.manual_seed(1)
    first, state = Random().score(view), torch.get_rng_state()
    torch.manual_seed(2)
    assert torch.equal(first, Random().score(view))
    torch.manual_seed(1)
    assert torch.equal(state, torch.get_rng_state())


def test_draws_look_uniform(make_view: MakeView) -> None:
    scores = Random().score(make_view(tokens=4000, batch=1, width=1))
    quartiles = torch.quantile(scores[0, 0], torch.tensor([0.25, 0.5, 0.75]))
    assert torch.allclose(quartiles, torch.tensor([0.25, 0.5, 0.75]), atol=0.03)
    correlation = torch.corrcoef(scores[0])[0, 1]
    assert abs(float(correlation)) < 0.06
