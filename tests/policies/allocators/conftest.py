"""Requests to allocators."""

import pytest
import torch

from kvp.ranking import Protection, Request, protected_scores


@pytest.fixture
def request_of():
    """Request as `kvp.hf` makes it: scores [L, H, N] (lists will do), budget, protection."""

    def make(scores, budget, protection=None):
        protection = protection or Protection(sinks=0, recents=0)
        tensor = torch.as_tensor(scores, dtype=torch.float32)
        return Request(
            scores=protected_scores(tensor, protection),
            budget=budget,
            floor=max(1, min(tensor.shape[-1], protection.tokens)),
        )

    return make


@pytest.fixture
def layers_of():
    """Request of so many layers, budget and tokens, whatever the scores."""

    def of(layers, budget, tokens, heads=2, floor=1):
        generator = torch.Generator().manual_seed(0)
        scores = torch.rand(layers, heads, tokens, generator=generator)
        return Request(scores=scores, budget=budget, floor=floor)

    return of
