"""Random tokens, the same in all heads of a layer.

Formula: score_i ~ U(0, 1), one draw per layer: that of `random` for head 0. A token that one head
loses is lost to the whole layer, where `random` leaves copies in other heads; Random Attention
(arXiv 2609.03430, section 5) has this shared draw as its control. Default seed 0. Cost: negligible.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from kvp.scoring import View
from policies.random import Random


@dataclass(frozen=True, kw_only=True)
class RandomPerLayer(Random):
    """Keep random tokens, the same in all heads of a layer."""

    method: ClassVar[str] = "random_per_layer"
    line: ClassVar[str] = "random tokens, the same in all heads of a layer"
    cost: ClassVar[str] = "one random number per token"
    null: ClassVar[bool] = True

    def score(self, view: View) -> Tensor:
        """Uniform numbers, the same in every row and head: [B, H, N] float32."""
        return super().score(view)[:, :1].expand(view.keys.shape[:3]).contiguous()
