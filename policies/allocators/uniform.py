"""The same number of tokens in every head: the default of every method.

With `whole` the first layers keep every token, as K-Norm is published (arXiv 2406.11430: layers 0
and 1, preset `knorm`). They count inside the budget: W whole layers of L leave the others
(L C - W N) / (L - W) tokens per head, C on average, cache of N. Where the budget does not reach,
the others keep the protected tokens, at least one, and the first layers share the rest.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from kvp.ranking import Request
from policies.allocators.per_layer import exact_counts
from policies.registry import BaseAllocator, Presets


@dataclass(frozen=True, kw_only=True)
class Uniform(BaseAllocator):
    """Give every head the budget."""

    whole: int = 0
    """First layers that keep every token, inside the budget."""

    method: ClassVar[str] = "uniform"
    line: ClassVar[str] = "the same number of tokens in every head"
    presets: ClassVar[Presets] = {"knorm": {"whole": 2}}

    def allocate(self, request: Request) -> Tensor:
        """The budget everywhere, or what whole layers leave: [L, H] int64, sum `request.total`."""
        shares = torch.ones(request.scores.shape[0], dtype=torch.float64)
        shares[: self.whole] = _WHOLE
        return exact_counts(shares, request)


_WHOLE = 1e9
"""Share of a layer that is full before another one, whose share is 1, gets more than its least."""
