"""The same number of tokens in every head: the default of every method."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from kvp.ranking import Request
from policies.registry import BaseAllocator


@dataclass(frozen=True, kw_only=True)
class Uniform(BaseAllocator):
    """Give every head the budget."""

    method: ClassVar[str] = "uniform"
    line: ClassVar[str] = "the same number of tokens in every head"

    def allocate(self, request: Request) -> Tensor:
        """The budget everywhere: [L, H] int64."""
        return torch.full(request.scores.shape[:2], request.budget, dtype=torch.int64)
