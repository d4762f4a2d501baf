"""The same number of tokens in every head: the default of every method."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from kvp.allocation import Request
from policies.allocators.per_layer import apportion_layers
from policies.base import BaseAllocator, Presets


@dataclass(frozen=True, kw_only=True)
class Uniform(BaseAllocator):
    """The same number of tokens in every head."""

    whole: int = 0
    """First layers that keep every token, inside the budget."""

    base_name: ClassVar[str] = "uniform"
    presets: ClassVar[Presets] = {"knorm": {"whole": 2}}

    def allocate(self, request: Request) -> Tensor:
        """The budget everywhere, or what whole layers leave: [L, H] int64, sum `request.total`."""
        shares = torch.ones(request.scores.shape[0], dtype=torch.float64)
        shares[: self.whole] = 1e9  # full before another layer gets more than its least
        return apportion_layers(shares, request)
