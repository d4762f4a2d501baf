"""TOVA (arXiv 2401.06104): keep what the last token attends to.

Formula: score_i = mean over *all* Q query heads of the layer of the last token's attention A[N-1,
i]; so every KV head of a layer keeps the same tokens. Options: `per_kv_head` averages over the G
heads of each KV head instead; `force_last` puts the last token first whatever its attention.
Preset `kvpress`: force_last, as its code does and the official code does not. Cost O(N D) per
query head. The paper drops one token per decoding step; here the ranking is used once after
prefill.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from kvp.ops.attention import recent_attention
from kvp.scoring import Needs, View
from policies.base import Grid, Heuristic, Presets
from policies.queries import FORCED


@dataclass(frozen=True, kw_only=True)
class TOVA(Heuristic):
    """Keep what the last token attends to."""

    per_kv_head: bool = False
    """Average over the query heads of a KV head, not of the layer."""
    force_last: bool = False
    """Always rank the last token first."""

    method: ClassVar[str] = "tova"
    line: ClassVar[str] = "what the last token attends to, same for all heads of a layer"
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
