"""All heads and layers keep the same tokens, as some engines need it (docs/methods/shared.md)."""

from dataclasses import dataclass
from typing import ClassVar, get_args

import torch
from torch import Tensor

from kvp.allocation import Pool, Request, pooled_scores
from policies.base import BaseAllocator, Grid


@dataclass(frozen=True, kw_only=True)
class Shared(BaseAllocator):
    """All heads keep the same tokens."""

    pool: Pool = "logsumexp"
    """How heads are pooled: `logsumexp`, `mean` or `max` of their scores."""

    base_name: ClassVar[str] = "shared"
    cost: ClassVar[str] = "one ranking, O(L H N)"
    reads: ClassVar[str] = "scores that compare everywhere"
    grid: ClassVar[Grid] = {"pool": get_args(Pool)}

    def pooled(self, scores: Tensor) -> Tensor:
        """The score of a token, in every head (`kvp.allocation.AllocatorParts`)."""
        return pooled_scores(scores, self.pool).expand(scores.shape)

    def allocate(self, request: Request) -> Tensor:
        """The budget everywhere: [L, H] int64."""
        return torch.full(request.scores.shape[:2], request.budget)
