"""PyramidKV (arXiv 2406.02069): the lowest layers get the most tokens (docs/methods/pyramid.md)."""

from dataclasses import dataclass
from typing import Annotated, ClassVar

from annotated_types import Ge
from torch import Tensor

from kvp.allocation import Request
from kvp.bounds import NotNegative
from policies.allocators.per_layer import apportion_layers, linear_budgets
from policies.base import BaseAllocator, Grid


@dataclass(frozen=True, kw_only=True)
class Pyramid(BaseAllocator):
    """Layers on a falling line, the lowest has most."""

    beta: Annotated[float, Ge(1)] = 20.0
    """Budget of the highest layer: the average divided by this."""
    window: NotNegative = 8
    """Tokens of every layer outside the pyramid."""

    base_name: ClassVar[str] = "pyramid"
    grid: ClassVar[Grid] = {"beta": (1.0, 2.0, 5.0, 10.0, 20.0, 40.0), "window": (0, 4, 8, 16, 32)}

    def allocate(self, request: Request) -> Tensor:
        """Falling counts: [L, H] int64, sum `request.total`."""
        layers, _, tokens = request.scores.shape
        window = min(self.window, request.budget)
        base = request.budget - window
        high = min(2 * base - base / self.beta, tokens - window)
        return apportion_layers(window + linear_budgets(high, 2 * base - high, layers), request)
