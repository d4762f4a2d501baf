"""Random tokens per KV head, with the question always kept.

Formula: score_i = 2 for tokens of the question, else that of `random`, u_i ~ U(0, 1) per KV head.
After Random Attention (arXiv 2609.03430, equation 3), which pins the whole prompt and evicts from
what the model generates: so does this while the model answers. Before that the prompt is what is
evicted from, and its question is pinned: everything after the context, chat template and answer
prefix included. Where a question has more
tokens than the budget, its last ones stay. Compressed before the question is read, or outside
kvp-eval, nothing is pinned and this is `random`. Default seed 0. Cost: negligible.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from kvp.scoring import Needs, View
from policies.random import Random

PINNED = 2.0
"""Score of a pinned token: above every draw."""


@dataclass(frozen=True, kw_only=True)
class RandomPinned(Random):
    """Keep the question and random tokens of the context."""

    method: ClassVar[str] = "random_pinned"
    line: ClassVar[str] = "the question, and random tokens"
    cost: ClassVar[str] = "one random number per token"
    null: ClassVar[bool] = True

    @property
    def needs(self) -> Needs:
        """Where the question begins."""
        return Needs(question=True)

    def score(self, view: View) -> Tensor:
        """Uniform numbers, the question above all: [B, H, N] float32."""
        scores = super().score(view)
        tokens = scores.shape[-1]
        scores[..., tokens - min(view.question, tokens) :] = PINNED
        if view.prompt:
            positions = view.positions if view.positions.ndim == 3 else view.positions[:, None]
            scores = scores.masked_fill(positions < view.prompt, PINNED)
        return scores
