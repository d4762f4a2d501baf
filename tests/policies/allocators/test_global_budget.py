"""The global budget: numbers by hand; `tests/golden` has random scores."""

from __future__ import annotations

from collections.abc import Callable

import torch

from kvp.ranking import Request
from policies.allocators.global_budget import Global
from policies.registry import make_allocator

RequestOf = Callable[..., Request]


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
