"""The global budget: numbers by hand, and KVzip's way of counting per layer in float64."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from kvp.allocation import Request
from kvp.ranking import Protection
from policies.allocators.ada import Ada
from policies.allocators.global_budget import Global
from policies.registry import make_allocator

RequestOf = Callable[..., Request]


def test_layers_and_heads_by_hand(request_of: RequestOf) -> None:
    layers = [[[0.9, 0.8, 0.7, 0.1]], [[0.6, 0.5, 0.05, 0.01]], [[0.4, 0.02, 0.03, 0.04]]]
    # 6 of 12: one each (0.9, 0.6, 0.4), then 0.8, 0.7, 0.5.
    assert Global(safeguard=0.0).allocate(request_of(layers, 2)).tolist() == [[3], [2], [1]]
    # Two of each at safeguard 1: uniform.
    assert Global(safeguard=1.0).allocate(request_of(layers, 2)).tolist() == [[2], [2], [2]]


def test_a_head_below_all_others_keeps_the_safeguard(request_of: RequestOf) -> None:
    scores = torch.rand(2, 2, 50)
    scores[1, 1] -= 5
    counts = {
        share: int(Global(safeguard=share).allocate(request_of(scores, 20))[1, 1])
        for share in (0.0, 0.2, 0.5)
    }
    assert counts == {0.0: 1, 0.2: 4, 0.5: 10}


def test_ties_go_to_the_newer_token_then_layer_then_head(request_of: RequestOf) -> None:
    allocator = make_allocator("global:kvzip")
    # Budget 2: 8 tokens, 4 are each head's newest, layer 1 head 1 wins two more; two are left.
    scores = torch.tensor([[[1, 1, 5], [1, 1, 5]], [[1, 1, 5], [9, 9, 9]]])
    assert allocator.allocate(request_of(scores, 2)).tolist() == [[2, 2], [1, 3]]
    scores[1, 0, 1] = 2
    assert allocator.allocate(request_of(scores, 2)).tolist() == [[2, 1], [2, 3]]
    scores[1, 0, 1], scores[0, 0, 1] = 1, 0
    assert allocator.allocate(request_of(scores, 2)).tolist() == [[1, 2], [2, 3]]


@pytest.mark.parametrize("safeguard", [0.0, 0.2, 0.7])
def test_equal_layers_are_split_as_one_layer_is(request_of: RequestOf, safeguard: float) -> None:
    layer = torch.randn(1, 4, 40) * torch.tensor([1.0, 2, 4, 8])[:, None]
    request = request_of(layer.expand(3, 4, 40), 12)
    counts = Global(safeguard=safeguard).allocate(request)
    assert torch.equal(counts, Ada(safeguard=safeguard).allocate(request))


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("ratio", [0.25, 0.5, 0.9])
def test_counts_are_those_of_kvzip(request_of: RequestOf, seed: int, ratio: float) -> None:
    """Count what falls to each layer of the lowest in the model, then drop inside the layer."""
    rng = np.random.default_rng(seed)
    layers, heads, tokens = 5, 3, 40
    scores = rng.random((layers, heads, tokens)).astype(np.float32)
    scores[:, :, :4] = 1 + np.arange(4)  # its sinks: no head goes empty
    pruned = int(ratio * layers * heads * tokens)
    size = heads * tokens
    per_layer = np.bincount(np.argsort(scores.reshape(-1))[:pruned] // size, minlength=layers)
    expected = [
        tokens - np.bincount(np.argsort(layer.reshape(-1))[:count] // tokens, minlength=heads)
        for layer, count in zip(scores, per_layer, strict=True)
    ]
    request = request_of(scores, round((1 - ratio) * tokens), Protection(sinks=4, recents=0))
    assert request.total == layers * heads * tokens - pruned
    assert np.array_equal(make_allocator("global:kvzip").allocate(request).numpy(), expected)
