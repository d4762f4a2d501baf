"""K-Norm (arXiv 2406.11430): keys of low norm attract attention.

Formula: score_i = -||k_i||_2, in float32. No options: kvpress computes the same. Cost O(N D) per
head. RoPE is a rotation, so keys before and after it score the same. The official code leaves
layers 0 and 1 whole: `knorm+uniform:knorm`. Alone, as in kvpress, every layer follows the budget.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from kvp.scoring import View
from policies.base import Heuristic, Presets


@dataclass(frozen=True, kw_only=True)
class KNorm(Heuristic):
    """Keep keys of low norm."""

    method: ClassVar[str] = "knorm"
    line: ClassVar[str] = "keys of low norm"
    cost: ClassVar[str] = "one pass over the keys, O(N D)"
    presets: ClassVar[Presets] = {"kvpress": {}}

    def score(self, view: View) -> Tensor:
        """Negative key norm: [B, H, N] float32."""
        norms: Tensor = torch.linalg.vector_norm(view.keys.float(), dim=-1)
        return -norms
