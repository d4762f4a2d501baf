"""Requests to allocators."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from kvp.ranking import Protection, Request, protected_scores


@pytest.fixture
def request_of() -> Callable[..., Request]:
    """Request as `kvp.hf` makes it: scores [L, H, N] (lists will do), budget, protection."""

    def make(scores: Any, budget: int, protection: Protection | None = None) -> Request:
        protection = protection or Protection(sinks=0, recents=0)
        tensor = torch.as_tensor(scores, dtype=torch.float32)
        return Request(
            scores=protected_scores(tensor, protection),
            budget=budget,
            floor=max(1, min(tensor.shape[-1], protection.tokens)),
        )

    return make


@pytest.fixture
def layers_of() -> Callable[..., Request]:
    """Request of so many layers, budget and tokens, whatever the scores."""

    def of(layers: int, budget: int, tokens: int, heads: int = 2, floor: int = 1) -> Request:
        generator = torch.Generator().manual_seed(0)
        scores = torch.rand(layers, heads, tokens, generator=generator)
        return Request(scores=scores, budget=budget, floor=floor)

    return of
