"""Ring: a ring buffer of the budget's size, in which the newest token overwrites the oldest.

Formula: score_i = i, so the latest `budget` tokens stay and no sinks. Token t of a stream goes to
slot t mod budget; after N tokens the buffer holds exactly these. No options. Cost: none. This is
the window attention that StreamingLLM (arXiv 2309.17453, section 1) is set against, and one of the
null baselines that audits of eviction compare scores with. `streaming_llm(n_sink=0)` keeps the same
tokens; with protected tokens on, so does `streaming_llm`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from kvp.scoring import View
from policies.base import Heuristic


@dataclass(frozen=True, kw_only=True)
class Ring(Heuristic):
    """Keep the most recent tokens."""

    method: ClassVar[str] = "ring"
    line: ClassVar[str] = "the most recent tokens"
    cost: ClassVar[str] = "nothing"
    null: ClassVar[bool] = True

    def score(self, view: View) -> Tensor:
        """Token index: [B, H, N] float32."""
        batch, heads, tokens, _ = view.keys.shape
        order = torch.arange(tokens, dtype=torch.float32, device=view.keys.device)
        return order.expand(batch, heads, -1).contiguous()
