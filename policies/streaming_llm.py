"""StreamingLLM (arXiv 2309.17453): first tokens and the latest (docs/methods/streaming_llm.md)."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from kvp.bounds import NotNegative
from kvp.scoring import Needs, View
from policies.base import BaseScorer, Grid, Presets


@dataclass(frozen=True, kw_only=True)
class StreamingLLM(BaseScorer):
    """Keep first tokens and the most recent ones."""

    sinks: NotNegative = 4
    keep_recents: bool = True
    """Let sinks take no more than half of the budget."""

    base_name: ClassVar[str] = "streaming_llm"
    presets: ClassVar[Presets] = {"kvpress": {"keep_recents": False}}
    grid: ClassVar[Grid] = {"sinks": (0, 1, 2, 4, 8, 16, 32), "keep_recents": (True, False)}

    @property
    def needs(self) -> Needs:
        """The budget, for `keep_recents`."""
        return Needs(budget=self.keep_recents)

    def score(self, view: View) -> Tensor:
        """Token index, sinks above all: [B, H, N] float32."""
        batch, heads, tokens, _ = view.keys.shape
        order = torch.arange(tokens, dtype=torch.float32, device=view.keys.device)
        sinks = min(self.sinks, tokens)
        if self.keep_recents:
            assert view.budget is not None
            sinks = min(sinks, view.budget // 2)
        order[:sinks] = 2 * tokens - order[:sinks]
        return order.expand(batch, heads, -1).contiguous()
