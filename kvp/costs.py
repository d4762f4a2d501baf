"""Sizes that dry runs count costs from, and time spans for people.

What is left out: counting itself, and measuring (`train.costs`, `kvp.hf.model_rates`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from kvp.geometry import Geometry

COMPRESSED = {"float32": 0.9, "float16": 0.7, "bfloat16": 0.7}
"""Share of the raw bytes that compression leaves, cautiously; 16-bit traces measured 0.69."""


@dataclass(frozen=True, kw_only=True)
class ModelSize:
    """A model as far as its costs go (`kvp.hf.model_size`)."""

    geometry: Geometry
    layers: int
    """All layers, those without evicted tokens included."""
    parameters: int
    """All weights."""
    layer_parameters: int
    """Weights of one layer that a token is multiplied with, mean over layers."""
    head_parameters: int
    """Weights of the output head."""
    hidden: int
    intermediate: int
    """Channels between the two products of a feed-forward block, of all experts that compute."""

    def flops(self, tokens: int, cached: int = 0, logits: int = 1) -> float:
        """Operations of feeding `tokens` tokens to a cache of `cached`, with some logits."""
        size = self.geometry
        attention = 4 * size.query_heads * size.head_dim * tokens * (cached + tokens / 2)
        weights = self.layers * self.layer_parameters * tokens + self.head_parameters * logits
        return 2 * weights + attention * self.layers


@dataclass(frozen=True, kw_only=True)
class Lengths:
    """Tokens of a sequence: upper bounds, or means of the prompts where they could be made."""

    prompt: int
    answer: int
    answers: Literal["model", "reference"] = "model"
    """Who writes the answer: the model, token by token, or the data."""
    bound: bool = True
    """Whether these are the longest possible ones, not means of prompts that were made."""
    make_seconds: float = 0.0
    """In which one of the prompts that were made was; 0 where none was."""

    @property
    def tokens(self) -> int:
        """T, of the whole sequence."""
        return self.prompt + self.answer


def span(seconds: float) -> str:
    """A time span for people."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    if seconds < 2 * 3600:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h"
