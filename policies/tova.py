"""TOVA (arXiv 2401.06104): what the last token attends to (docs/methods/tova.md)."""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from kvp.ops.attention import recent_attention
from kvp.scoring import Needs, View
from policies.base import FORCED, BaseScorer, Grid, Presets


@dataclass(frozen=True, kw_only=True)
class TOVA(BaseScorer):
    """Keep what the last token attends to, same for all heads of a layer."""

    per_kv_head: bool = False
    """Average over the query heads of a KV head, not of the layer."""
    force_last: bool = False

    base_name: ClassVar[str] = "tova"
    cost: ClassVar[str] = "one query's attention, O(G N D)"
    presets: ClassVar[Presets] = {"kvpress": {"force_last": True}}
    grid: ClassVar[Grid] = {"per_kv_head": (False, True), "force_last": (False, True)}

    needs = Needs(queries=1)

    def score(self, view: View) -> Tensor:
        """Attention of the last token, the same for every KV head: [B, H, N] float32."""
        assert view.queries is not None
        attention = recent_attention(view.queries, view.keys, 1).squeeze(-2)
        if self.per_kv_head:
            scores = attention.mean(dim=2)
        else:
            layer = attention.mean(dim=(1, 2))
            scores = layer[:, None].expand(-1, view.keys.shape[1], -1).contiguous()
        if self.force_last:
            scores[..., -1] = FORCED
        return scores
