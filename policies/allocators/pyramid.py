"""PyramidKV (arXiv 2406.02069): budgets fall linearly from the lowest layer to the highest.

Formula, C tokens per head on average, w of them a window that every layer has (its most recent
tokens), B = C - w, cache of N: the highest layer gets low = B / beta, the lowest high = 2 B - low,
at most N - w (then low = 2 B - high); layers between lie on the line; w more for each. All heads of
a layer get the same. Exact sum by largest remainders; what the protected tokens or N take away is
shared by the other layers. Defaults beta 20, w 8. The published method scores as SnapKV:
`snapkv+pyramid`.

`rounding=faithful` gives KVCache-Factory's integers: low = B // beta, steps (high - low) // (L - 1)
from the lowest layer upwards, and C everywhere when N < 2 B. Rounded steps leave the higher layers
more than the line: a mean of 133.5 for C = 128 and of 526 for 512 (32 layers), which breaks equal
budgets. Preset `kvpress` (0.5.5): the window (64) inside the line, high = 2 C - C / beta at most
N - 64, each layer rounded by itself, halves to even; C everywhere where the top would have fewer
than 64. Cost: nothing per token.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from typing import ClassVar

import torch
from torch import Tensor

from kvp.ranking import Request
from policies.allocators.per_layer import ROUNDINGS, exact_counts, line, published_counts
from policies.registry import BaseAllocator, Grid, Limits, Numbers, Presets


@dataclass(frozen=True, kw_only=True)
class Pyramid(BaseAllocator):
    """Give low layers more."""

    beta: float = 20.0
    """Budget of the highest layer: the average divided by this."""
    window: int = 8
    """Tokens of every layer outside the pyramid (`rounding=kvpress`: minimum of a layer)."""
    rounding: str = "exact"
    """`exact` meets the budget; `faithful` and `kvpress` give the integers of these codes."""

    method: ClassVar[str] = "pyramid"
    line: ClassVar[str] = "layers on a falling line, the lowest has most"
    presets: ClassVar[Presets] = {"kvpress": {"window": 64, "rounding": "kvpress"}}
    limits: ClassVar[Limits] = {"beta": (1, inf), "rounding": (*ROUNDINGS, "kvpress")}
    grid: ClassVar[Grid] = {
        "beta": Numbers(values=(1.0, 2.0, 5.0, 10.0, 20.0, 40.0), minimum=1),
        "window": Numbers(values=(0, 4, 8, 16, 32)),
    }

    def allocate(self, request: Request) -> Tensor:
        """Falling counts: [L, H] int64, sum `request.total`; published roundings miss it."""
        if self.rounding != "exact":
            counts = self._kvpress if self.rounding == "kvpress" else self._faithful
            return published_counts(counts(request), request)
        layers, _, tokens = request.scores.shape
        window = min(self.window, request.budget)
        base = request.budget - window
        high = min(2 * base - base / self.beta, tokens - window)
        return exact_counts(window + line(high, 2 * base - high, layers), request)

    def _faithful(self, request: Request) -> Tensor:
        layers, _, tokens = request.scores.shape
        window = min(self.window, request.budget)
        base = request.budget - window
        if tokens < 2 * base or layers == 1:
            return torch.full((layers,), request.budget)
        high = min(2 * base - int(base // self.beta), tokens - window)
        return window + high - torch.arange(layers) * (2 * (high - base) // (layers - 1))

    def _kvpress(self, request: Request) -> Tensor:
        layers, _, tokens = request.scores.shape
        low = request.budget / self.beta
        high = 2 * request.budget - low
        if high >= tokens - self.window:
            high = tokens - self.window
            low = 2 * request.budget - high
        if layers == 1 or not tokens >= high >= low >= self.window:
            return torch.full((layers,), request.budget)
        return line(high, low, layers).round().long()
