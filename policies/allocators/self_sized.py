"""The sizes that a scorer gives (GVote, arXiv 2509.03136), whatever the budget."""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from kvp.allocation import Request
from kvp.errors import UsageError
from policies.base import BaseAllocator

UNSIZED = (
    "does not say how many tokens it needs; choose another allocator, or a method that does (gvote)"
)


@dataclass(frozen=True, kw_only=True)
class SelfSized(BaseAllocator):
    """The sizes that the scorer gives, whatever the budget."""

    base_name: ClassVar[str] = "self_sized"
    reads: ClassVar[str] = "a scorer that sizes the cache itself"
    self_sized: ClassVar[bool] = True
    meets_budget: ClassVar[bool] = False

    def allocate(self, request: Request) -> Tensor:
        """The scorer's sizes from `request.floor` to N: [L, H] int64; UsageError without any."""
        if request.sizes is None:
            raise UsageError(f"allocator {self.base_name}: the method {UNSIZED}")
        return request.sizes.long().clamp(request.floor, request.scores.shape[-1])
