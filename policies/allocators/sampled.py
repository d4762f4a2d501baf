"""Randomised eviction: the head of every ranking stays, the rest of its places is drawn by lot.

Formula: `split` says how many tokens b a head keeps. The first round(share b) of its ranking stay
for certain, protected tokens always; the other places are drawn from the tokens that follow, with
inclusion probabilities pi in proportion to their sizes (`kvp.inclusion`: fixed number, capped at
1). Attention adds log(1 / pi) to the logits of what was drawn, so that its sums over the cache are
right on average (arXiv 2607.21475, 2608.28293; both found in summaries only, so that sizes, share
and design are ours).

Sizes, with T = `temperature` and r the place in the ranking, 1 for the best token:

- `rank`: r^(-1/T), for scores of any kind;
- `score`: score^(1/T), for scores that are shares of attention (snapkv, kvzip);
- `exp`: exp(score / T), for logarithms of them (learned policies): what Plackett-Luce draws by.

No size is below `LEAST_SIZE` of the mean of the tokens it competes with, which bounds the weights.
The generator is keyed by (seed, L, H, N), so that a result depends on nothing else. Cost: one sort
per head, O(L H N log N).
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from kvp.allocation import Allocator, Request
from kvp.inclusion import inclusion_probabilities, systematic_sample
from policies.allocators.ada import Ada
from policies.allocators.global_budget import Global
from policies.allocators.pyramid import Pyramid
from policies.allocators.uniform import Uniform
from policies.base import BaseAllocator, check_choice, check_integer, check_number

SPLITS: Mapping[str, Allocator] = {
    rule.name: rule for rule in (Uniform(), Pyramid(), Ada(), Global(), Global(safeguard=0.0))
}
"""Rules that may split the budget, by name."""
SIZES = ("rank", "score", "exp")
"""What inclusion probabilities are in proportion to."""
LEAST_SIZE = 0.1
"""Smallest size, as a share of the mean size of the tokens of a head that may be drawn."""


@dataclass(frozen=True, kw_only=True)
class Sampled(BaseAllocator):
    """Keep the best tokens of a head and draw the others by lot, weighted to make up for it."""

    share: float = 0.75
    """Share of a head's tokens that is kept for certain, 0 to 1; 1 draws nothing."""
    split: str = "global"
    """Rule that splits the budget over the heads."""
    size: str = "rank"
    """What inclusion probabilities follow: `rank`, `score` or `exp` of the score."""
    temperature: float = 1.0
    """Larger: closer to equal probabilities."""
    seed: int = 0
    """Key of the draw."""

    method: ClassVar[str] = "sampled"

    def __post_init__(self) -> None:
        """Raise UsageError on an unknown split or size and on numbers that are not allowed."""
        check_number(self.method, "share", self.share, minimum=0, maximum=1)
        check_choice(self.method, "split", self.split, tuple(SPLITS))
        check_choice(self.method, "size", self.size, SIZES)
        check_number(self.method, "temperature", self.temperature, minimum=0.01)
        check_integer(self.method, "seed", self.seed, minimum=0)

    def allocate(self, request: Request) -> Tensor:
        """Counts of `split`: [L, H] int64, sum `request.total`."""
        return SPLITS[self.split].allocate(request)

    def log_weights(
        self, scores: Tensor, ranking: Tensor, counts: Tensor, protected: int
    ) -> Tensor:
        """Draw: log(1 / pi) of tokens that stay, -inf of others, as `SamplingAllocator`."""
        certain = (self.share * counts.double()).round().long().clamp_min(protected)
        certain = torch.minimum(certain, counts)
        tokens = ranking.shape[-1]
        place = torch.arange(tokens, device=ranking.device).expand(ranking.shape)  # in the ranking
        head = place < certain[..., None]
        sizes = self._sizes(scores.gather(-1, ranking), place, head)
        probabilities = inclusion_probabilities(sizes, counts - certain)
        order, start = self._lots(ranking)
        stays = head | systematic_sample(probabilities, order, start)
        weights = torch.where(head, 0.0, -probabilities.log()).masked_fill(~stays, -torch.inf)
        return torch.empty_like(weights).scatter(-1, ranking, weights).float()

    def _sizes(self, ranked: Tensor, place: Tensor, head: Tensor) -> Tensor:
        """Sizes of tokens in the order of their ranking, 0 in the head: [L, H, N] float64."""
        limit = torch.finfo(torch.float32)
        if self.size == "rank":
            logs = -(place + 1).double().log()
        elif self.size == "score":
            logs = ranked.double().clamp(limit.tiny, limit.max).log()
        else:
            logs = ranked.double().clamp(limit.min, limit.max)
        logs = (logs / self.temperature).masked_fill(head, -torch.inf)
        largest = logs.amax(-1, keepdim=True)
        sizes = (logs - torch.where(largest.isinf(), 0.0, largest)).exp()
        drawable = (~head).sum(-1, keepdim=True).clamp_min(1)
        least = LEAST_SIZE * sizes.sum(-1, keepdim=True) / drawable
        return sizes.maximum(least).masked_fill(head, 0.0)

    def _lots(self, ranking: Tensor) -> tuple[Tensor, Tensor]:
        """A random order [L, H, N] and start [L, H] for every head."""
        key = "/".join(map(str, (self.seed, *ranking.shape)))
        digest = hashlib.sha256(key.encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))
        order = torch.rand(ranking.shape, generator=generator).argsort(-1)
        start = torch.rand(ranking.shape[:-1], generator=generator, dtype=torch.float64)
        return order.to(ranking.device), start.to(ranking.device)
