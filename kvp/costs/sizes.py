"""Sizes that costs are counted from: of a model, its sequences, its rankers and their training.

Work is in floating-point operations of matrix products (a multiplication and an addition are two).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from kvp.geometry import Geometry

_GRID_SHARE = 1.75
"""Pairs of an importance grid over those of the causal square: all maxima, and sums from the middle
of the sequence on, the first of the common points (`kvp.store.importance_grid`)."""


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

    def prompt_flops(self, tokens: int) -> float:
        """Operations of a forward pass over `tokens` tokens, logits of the last one alone."""
        return (
            2 * (self.layers * self.layer_parameters * tokens + self.head_parameters)
            + self.attention_flops(tokens) * self.layers
        )

    def fed_flops(self, tokens: int, cached: int) -> float:
        """Operations of feeding `tokens` tokens to a cache of `cached`, logits of all of them."""
        size = self.geometry
        attention = 4 * size.query_heads * size.head_dim * tokens * (cached + tokens / 2)
        weights = self.layers * self.layer_parameters + self.head_parameters
        return 2 * weights * tokens + attention * self.layers

    def attention_flops(self, tokens: int) -> float:
        """Operations of one layer's causal attention: two products of half a square."""
        size = self.geometry
        return 2 * size.query_heads * size.head_dim * tokens**2

    def grid_pairs(self, tokens: int) -> float:
        """Pairs of a query and a key that one layer's importance grids compute."""
        return _GRID_SHARE * tokens**2 / 2 * self.geometry.query_heads


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


@dataclass(frozen=True, kw_only=True)
class RankerSize:
    """One ranker (`policies.ranker_rate`)."""

    parameters: int
    """Trained values."""
    products: int
    """Weights that a token is multiplied with."""
    token_bytes: int
    """Activations and temporaries of one token while training."""
    update_flops: float
    """Operations of one optimiser step."""


@dataclass(frozen=True, kw_only=True)
class TrainingSize:
    """A training as kvp-train runs it; the defaults are its defaults, which a test compares."""

    steps: int = 1_000
    contexts: int = 8
    """Contexts per step."""
    prompt_weight: float = 0.4
    context_weight: float = 0.4
    uniform_weight: float = 0.2
    uniform_points: int = 16
    """Evenly spaced compression points of a sequence; 0 = every position."""
    min_prefix: int = 64
    validate_every: int = 100
    validation_contexts: int = 64
    calibration_contexts: int = 128
    """0 where nothing is calibrated."""
    activation_bytes: float = 8e9
    memory_bytes: float = 4e9
    """RAM for what is kept instead of being read again, at least (`--memory_gb`)."""

    @property
    def draws(self) -> int:
        """Contexts of a whole training."""
        return self.steps * self.contexts

    def kinds(self) -> tuple[float, float, float]:
        """Shares of compression points before the answer, at the context's end and anywhere."""
        weights = (self.prompt_weight, self.context_weight, self.uniform_weight)
        return tuple(weight / sum(weights) for weight in weights)  # type: ignore[return-value]

    def prefix(self, lengths: Lengths) -> float:
        """Mean tokens of a context."""
        *exact, anywhere = self.kinds()
        return sum(exact) * lengths.prompt + anywhere * (self.min_prefix + lengths.tokens) / 2

    def point_counts(self, draws: float, lengths: Lengths) -> tuple[float, float, float]:
        """Expected different compression points of each kind that `draws` draws of a sequence meet.

        One point of each of the first two kinds, `uniform_points` of the third.
        """
        prompt, context, uniform = self.kinds()
        points = self.uniform_points or max(lengths.tokens - self.min_prefix, 1)
        met = [1 - (1 - share) ** draws for share in (prompt, context, uniform / points)]
        return met[0], met[1], met[2] * points

    def label_pairs(self, counts: tuple[float, float, float], lengths: Lengths) -> float:
        """Pairs of a query and a key that labels at so many points of each kind compute.

        Per query head: every query of the future looks at all keys up to its own, once, whatever it
        counts. Points anywhere are taken as evenly spread.
        """
        answer, tokens = max(lengths.answer, 1), lengths.tokens
        exact = answer * (lengths.prompt + answer / 2)
        anywhere = tokens**2 / 3
        return (counts[0] + counts[1]) * exact + counts[2] * anywhere

    def points(self, epochs: int) -> int:
        """Compression points kept of a sequence in so many epochs, at most.

        A point that is drawn again is kept once, and there are two next to the uniform ones.
        """
        return min(epochs, self.uniform_points + 2) if self.uniform_points else epochs

    def held_out(self, validation: int, wanted: int) -> int:
        """Held-out contexts that `validation` sequences give: at most two each."""
        points = (self.prompt_weight > 0) + (self.context_weight > 0) or 1
        return min(wanted, points * validation)
