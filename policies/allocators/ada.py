"""AdaKV (arXiv 2407.11550): heads of a layer compete for its budget (docs/methods/ada.md)."""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from kvp.allocation import Request, count_winners
from kvp.bounds import Share
from policies.base import BaseAllocator, Grid


@dataclass(frozen=True, kw_only=True)
class Ada(BaseAllocator):
    """The heads of a layer compete, each with a safeguard."""

    safeguard: Share = 0.2
    """Share of the budget that every head has for itself, 0 to 1; 1 is uniform."""

    base_name: ClassVar[str] = "ada"
    cost: ClassVar[str] = "a selection per layer, O(H N)"
    reads: ClassVar[str] = "scores that compare within a layer"
    grid: ClassVar[Grid] = {"safeguard": (0.0, 0.05, 0.1, 0.2, 0.35, 0.5, 0.7, 1.0)}

    def allocate(self, request: Request) -> Tensor:
        """Tokens of each head: [L, H] int64, every layer H * budget."""
        safe = max(request.floor, int(self.safeguard * request.budget + 1e-9))  # 0.29 of 100: 29
        budget = request.scores.shape[1] * request.budget
        return count_winners(request.scores, budget, guaranteed=safe)
