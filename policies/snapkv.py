"""SnapKV (arXiv 2404.14469): what the last tokens of the prompt attend to.

Formula and published settings: docs/methods/snapkv.md. The automatic window follows the budget, so
that a small one is not spent on the window itself. With no more tokens than the window: recency.
"""

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from kvp.bounds import Positive
from kvp.errors import UsageError
from kvp.ops.attention import recent_attention
from kvp.scoring import Needs, View
from policies.base import AUTO, FORCED, Auto, BaseScorer, Grid, Presets

_LARGEST_AUTO_WINDOW = 32


@dataclass(frozen=True, kw_only=True)
class SnapKV(BaseScorer):
    """Keep what the last window of queries attends to, and the window."""

    window: Positive | Auto = AUTO
    """Most recent queries that vote, or `auto` to follow the budget."""
    kernel: Positive = 5
    """Width of the pooling over positions, in tokens; odd."""
    pool: Literal["max", "avg"] = "max"

    base_name: ClassVar[str] = "snapkv"
    cost: ClassVar[str] = "the window's attention, O(G window N D)"
    presets: ClassVar[Presets] = {
        "kvpress": {"window": 64, "kernel": 5, "pool": "avg"},
        "paper": {"window": 32, "kernel": 7, "pool": "max"},
        "official": {"window": 32, "kernel": 5, "pool": "avg"},
    }
    grid: ClassVar[Grid] = {
        "kernel": (3, 7, 15, 31, 63),
        "window": (AUTO, 4, 8, 16, 32, 64),
        "pool": ("max", "avg"),
    }

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.kernel % 2 == 0:
            raise UsageError(f"{self.base_name}: kernel must be odd, got {self.kernel}")

    @property
    def needs(self) -> Needs:
        """The queries of the largest window, and the budget for one that follows it."""
        if isinstance(self.window, int):
            return Needs(queries=self.window)
        return Needs(queries=_LARGEST_AUTO_WINDOW, budget=True)

    def score(self, view: View) -> Tensor:
        """Pooled window attention, the window itself at `FORCED`: [B, H, N] float32."""
        assert view.queries is not None
        batch, heads, tokens, _ = view.keys.shape
        scores = torch.full((batch, heads, tokens), FORCED, device=view.keys.device)
        if isinstance(self.window, int):
            window = self.window
        else:
            assert view.budget is not None
            window = min(_LARGEST_AUTO_WINDOW, max(1, view.budget // 4))
        window = min(window, max(view.queries.shape[2], 1))
        before = tokens - window
        if before <= 0:
            return scores
        attention = recent_attention(view.queries, view.keys, window)
        votes = attention[..., :before].mean(dim=-2)
        signals = votes.flatten(0, -2)[:, None]  # [B * Q, 1, N], as 1-D pooling takes them
        pool = F.max_pool1d if self.pool == "max" else F.avg_pool1d
        pooled = pool(signals, self.kernel, stride=1, padding=self.kernel // 2).view_as(votes)
        scores[..., :before] = pooled.mean(dim=-2)
        return scores
