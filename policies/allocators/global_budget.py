"""KVzip (arXiv 2505.23416, section 3.4): all heads share one budget (docs/methods/global.md)."""

from dataclasses import dataclass, replace
from typing import ClassVar

from torch import Tensor

from kvp.allocation import Request
from policies.allocators.ada import Ada
from policies.base import Presets


@dataclass(frozen=True, kw_only=True)
class Global(Ada):
    """All heads of the model compete, each with a safeguard."""

    base_name: ClassVar[str] = "global"
    cost: ClassVar[str] = "one selection, O(L H N)"
    reads: ClassVar[str] = "scores that compare across layers"
    presets: ClassVar[Presets] = {"kvzip": {"safeguard": 0.0}}

    def allocate(self, request: Request) -> Tensor:
        """Tokens of each head: [L, H] int64, sum `request.total`."""
        one_layer = replace(request, scores=request.scores.flatten(0, 1)[None])  # of all heads
        return super().allocate(one_layer).view(request.scores.shape[:2])
