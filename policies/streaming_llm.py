"""StreamingLLM (arXiv 2309.17453): attention sinks and the most recent tokens.

Formula: keep the first `n_sink` tokens and the latest budget - n_sink. As a ranking: sink 0, 1,
..., then the newest token, the one before it, and so on. Default n_sink = 4 (paper and kvpress).
Cost: none. Where the budget is small, only min(n_sink, budget // 2) tokens count as sinks, so that
recent ones survive (no paper says). The official code also moves the kept keys to positions inside
its rolling cache; here every method keeps true positions.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from kvp.scoring import View
from policies.options import Heuristic, check_integer


@dataclass(frozen=True, kw_only=True)
class StreamingLLM(Heuristic):
    """Keep the first and the last tokens."""

    n_sink: int = 4
    """First tokens that come before all others."""

    method: ClassVar[str] = "streaming_llm"

    def __post_init__(self) -> None:
        """Raise UsageError on a negative number of sinks."""
        check_integer(self.method, "n_sink", self.n_sink, least=0)

    def score(self, view: View) -> Tensor:
        """Token index, sinks above all: [B, H, N] float32."""
        batch, heads, tokens, _ = view.keys.shape
        order = torch.arange(tokens, dtype=torch.float32, device=view.keys.device)
        sinks = min(self.n_sink, view.budget // 2, tokens)
        order[:sinks] = 2 * tokens - order[:sinks]
        return order.expand(batch, heads, -1).contiguous()
