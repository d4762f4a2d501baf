"""All heads and layers keep the same tokens, as engines with one list of tokens need it.

Formula, C tokens: the scores of a token in all heads of all layers become one number
(`kvp.ranking.pooled_scores`), and every head keeps the C best tokens by it. With `block` b > 1
tokens i b to (i + 1) b - 1 of the cache form block i, its score is the largest of its tokens', and
the best whole blocks are kept that fit into C tokens together: blocks with a protected token first,
then at least one. Ties go to the newer token or block. Cost: one ranking, O(L H N).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from kvp.ranking import POOLS, Request, pooled_scores, rank_tokens
from policies.registry import BaseAllocator, Choices, Grid, Limits


@dataclass(frozen=True, kw_only=True)
class Shared(BaseAllocator):
    """Keep the same tokens in every head."""

    pool: str = "logsumexp"
    """How heads are pooled: `logsumexp`, `mean` or `max` of their scores."""
    block: int = 1
    """Tokens that are kept or evicted together, as the pages of an engine."""

    method: ClassVar[str] = "shared"
    line: ClassVar[str] = "all heads keep the same tokens, or blocks of them"
    cost: ClassVar[str] = "one ranking, O(L H N)"
    reads: ClassVar[str] = "scores that compare everywhere"
    limits: ClassVar[Limits] = {"pool": POOLS, "block": 1}
    grid: ClassVar[Grid] = {"pool": Choices(POOLS)}

    @property
    def meets_budget(self) -> bool:
        """Whole blocks miss it where it is no multiple of them."""
        return self.block == 1

    def pooled(self, scores: Tensor) -> Tensor:
        """The score of a token or of its block, in every head (`kvp.ranking.Pooling`)."""
        pooled = pooled_scores(scores, self.pool)  # [N]
        tokens = len(pooled)
        padded = F.pad(pooled, (0, -tokens % self.block), value=-torch.inf)
        best = padded.view(-1, self.block).amax(-1)  # [blocks]
        return best.repeat_interleave(self.block)[:tokens].expand(scores.shape)

    def allocate(self, request: Request) -> Tensor:
        """The budget, or the tokens of the whole blocks within it, everywhere: [L, H] int64."""
        scores = request.scores[0, 0]
        block_of = rank_tokens(scores) // self.block  # [N] by rank
        ends = block_of.diff(append=block_of.new_tensor([-1])).nonzero()[:, 0]
        sizes = ends + 1  # [blocks] tokens of the best 1, 2, ... blocks
        forced = int((scores >= torch.finfo(scores.dtype).max).sum())  # in protected blocks
        least, fitting = int((sizes < forced).sum()), int((sizes <= request.budget).sum())
        return torch.full(request.scores.shape[:2], int(sizes[max(least, fitting - 1)]))
