"""Controls: what methods have to clear, and what bounds them (docs/methods/README.md).

Draws are keyed by (seed, layer, head, N), so a result depends on nothing else: not on the order of
calls, the batch, the device or the process. In a cache that has been shrunk before the newest
position is part of the key, so that every eviction draws anew.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from kvp.bounds import NotNegative
from kvp.scoring import Needs, View
from policies.base import FORCED, BaseScorer, keyed_generator


@dataclass(frozen=True, kw_only=True)
class Random(BaseScorer):
    """Keep random tokens, seeded."""

    seed: NotNegative = 0

    base_name: ClassVar[str] = "random"
    cost: ClassVar[str] = "one random number per token"

    def score(self, view: View) -> Tensor:
        """Uniform numbers, [B, H, N] float32; the same for every sequence of a batch."""
        batch, heads, tokens, _ = view.keys.shape
        newest = f"/{int(view.positions.max())}" if view.positions.ndim == 3 else ""
        first = view.heads.start or 0
        keys = [f"{self.seed}/{view.layer}/{first + h}/{tokens}{newest}" for h in range(heads)]
        draws = torch.stack([torch.rand(tokens, generator=keyed_generator(key)) for key in keys])
        return draws.to(view.keys.device).expand(batch, -1, -1).contiguous()


@dataclass(frozen=True, kw_only=True)
class RandomPerLayer(Random):
    """Keep random tokens, the same in all heads of a layer."""

    base_name: ClassVar[str] = "random_per_layer"

    def score(self, view: View) -> Tensor:
        """Uniform numbers, the same in every row and head: [B, H, N] float32."""
        return super().score(view)[:, :1].expand(view.keys.shape[:3]).contiguous()


@dataclass(frozen=True, kw_only=True)
class RandomPinned(Random):
    """Keep the question, and random tokens."""

    base_name: ClassVar[str] = "random_pinned"

    needs = Needs(question=True)

    def score(self, view: View) -> Tensor:
        """Uniform numbers, the question above all: [B, H, N] float32."""
        scores = super().score(view)
        tokens = scores.shape[-1]
        scores[..., tokens - min(view.question_tokens, tokens) :] = FORCED
        return scores.masked_fill(view.head_positions < view.prompt_tokens, FORCED)


@dataclass(frozen=True, kw_only=True)
class Ring(BaseScorer):
    """Keep the most recent tokens."""

    base_name: ClassVar[str] = "ring"

    def score(self, view: View) -> Tensor:
        """Token index: [B, H, N] float32."""
        batch, heads, tokens, _ = view.keys.shape
        order = torch.arange(tokens, dtype=torch.float32, device=view.keys.device)
        return order.expand(batch, heads, -1).contiguous()


@dataclass(frozen=True, kw_only=True)
class Oracle(BaseScorer):
    """Keep what the future will attend to (hindsight: bounds attention, not answers)."""

    base_name: ClassVar[str] = "oracle"
    cost: ClassVar[str] = "the future itself"

    needs = Needs(future=True)

    def score(self, view: View) -> Tensor:
        """Future attention: [B, H, N] float32."""
        assert view.future is not None
        return view.future.float()
