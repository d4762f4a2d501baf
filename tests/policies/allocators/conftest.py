"""Requests to allocators."""

import pytest
import torch

from kvp.ranking import Request


@pytest.fixture
def layers_of():
    """Request of so many layers, budget and tokens, whatever the scores."""

    def of(layers, budget, tokens, heads=2, floor=1):
        generator = torch.Generator().manual_seed(0)
        scores = torch.rand(layers, heads, tokens, generator=generator)
        return Request(scores=scores, budget=budget, floor=floor)

    return of
