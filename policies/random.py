"""Random: the floor every other method has to clear.

Formula: score_i ~ U(0, 1), independent per KV head. Default seed 0. Cost: negligible. The
generator is keyed by (seed, layer, head, N), so a result depends on nothing else: not on the order
of calls, the batch, the device or the process. In a cache that has been shrunk before the newest
position is part of the key, so that every eviction draws anew. Public code draws from the global
generator, or (with a seed) gives every layer the same draw.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from kvp.scoring import View
from policies.base import Heuristic, check_integer


@dataclass(frozen=True, kw_only=True)
class Random(Heuristic):
    """Keep random tokens."""

    seed: int = 0
    """Key of the draw."""

    method: ClassVar[str] = "random"
    line: ClassVar[str] = "random tokens, seeded"
    cost: ClassVar[str] = "one random number per token"
    null: ClassVar[bool] = True

    def __post_init__(self) -> None:
        """Raise UsageError on a seed that is not a number >= 0."""
        check_integer(self.method, "seed", self.seed, minimum=0)

    def score(self, view: View) -> Tensor:
        """Uniform numbers, [B, H, N] float32; the same for every sequence of a batch."""
        batch, heads, tokens, _ = view.keys.shape
        again = f"/{int(view.positions.max())}" if view.positions.ndim == 3 else ""
        first = view.heads.start or 0
        by_head = [
            self._draw(f"{view.layer}/{first + head}/{tokens}{again}", tokens)
            for head in range(heads)
        ]
        return torch.stack(by_head).to(view.keys.device).expand(batch, -1, -1).contiguous()

    def _draw(self, key: str, tokens: int) -> Tensor:
        digest = hashlib.sha256(f"{self.seed}/{key}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))
        return torch.rand(tokens, generator=generator)
