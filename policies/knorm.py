"""K-Norm (arXiv 2406.11430): keys of low norm attract attention (docs/methods/knorm.md)."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from kvp.scoring import View
from policies.base import BaseScorer, Presets


@dataclass(frozen=True, kw_only=True)
class KNorm(BaseScorer):
    """Keep keys of low norm."""

    base_name: ClassVar[str] = "knorm"
    cost: ClassVar[str] = "one pass over the keys, O(N D)"
    presets: ClassVar[Presets] = {"kvpress": {}}

    def score(self, view: View) -> Tensor:
        """Negative key norm: [B, H, N] float32."""
        norms: Tensor = torch.linalg.vector_norm(view.keys.float(), dim=-1)
        return -norms
