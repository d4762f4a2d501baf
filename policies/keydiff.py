"""KeyDiff (arXiv 2504.15364): keep keys that differ from the mean (docs/methods/keydiff.md)."""

from dataclasses import dataclass
from typing import ClassVar

import torch.nn.functional as F
from torch import Tensor

from kvp.scoring import View
from policies.base import BaseScorer, Presets


@dataclass(frozen=True, kw_only=True)
class KeyDiff(BaseScorer):
    """Keep keys unlike the average key."""

    base_name: ClassVar[str] = "keydiff"
    cost: ClassVar[str] = "two passes over the keys, O(N D)"
    presets: ClassVar[Presets] = {"kvpress": {}}

    def score(self, view: View) -> Tensor:
        """Negative cosine to the anchor: [B, H, N] float32."""
        directions = F.normalize(view.keys.float(), dim=-1)
        anchor = F.normalize(directions.mean(dim=-2, keepdim=True), dim=-1)
        return -(directions * anchor).sum(dim=-1)
