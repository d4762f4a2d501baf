"""What is to be made: sequences, rankers and their training, and the bytes that follow."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

from kvp.costs import COMPRESSED, Lengths, ModelSize
from kvp.geometry import Geometry
from kvp.store import StoreKind, planned_bytes
from kvp.store.schema import DTYPES
from policies.ranker import bytes_per_token
from policies.ranker_spec import RankerSpec
from train.config import TrainConfig
from train.labels.label import label_of
from train.recipe import Recipe

GRID = 48
"""Points of the importance grids that kvp-collect makes by default."""
_HELD_OUT_POINTS = 6
"""Labels kept of a validation sequence while the model runs: three at two points."""
_QUANTISED = {"8bit": 1.0, "4bit": 0.5}
"""Bytes per quantised weight."""


@dataclass(frozen=True, kw_only=True)
class TrainingPlan:
    """A training, on sequences wherever they come from."""

    config: TrainConfig
    geometry: Geometry
    dtype: str
    """Of the traces."""
    lengths: Lengths
    train: int
    """Training sequences."""
    validation: int

    @cached_property
    def recipe(self) -> Recipe:
        """The recipe of the configuration."""
        return self.config.recipe()

    @property
    def stored_labels(self) -> tuple[str, ...]:
        """Labels that are stored with traces."""
        stored = label_of(self.recipe.label).stored
        return () if stored is None else (stored,)

    @property
    def draws(self) -> int:
        """Contexts of a whole training."""
        return self.recipe.steps * self.recipe.contexts

    @property
    def memory_bytes(self) -> float:
        """RAM for what is remembered instead of being read again."""
        return self.config.memory_gb * 1e9

    @property
    def _uniform_share(self) -> float:
        """Share of compression points that may be anywhere."""
        recipe = self.recipe
        uniform = recipe.compress_uniform
        return uniform / (uniform + recipe.compress_prompt + recipe.compress_context)

    @property
    def prefix(self) -> float:
        """Mean tokens of a context."""
        uniform, lengths = self._uniform_share, self.lengths
        middle = (self.recipe.min_prefix + lengths.tokens) / 2
        return (1 - uniform) * lengths.prompt + uniform * middle

    def points(self, draws: float) -> tuple[float, float]:
        """Different points that `draws` draws of a sequence meet: exact ones, and any others."""
        recipe, uniform = self.recipe, self._uniform_share
        boundaries = recipe.compress_prompt, recipe.compress_context
        exact = sum(1 - (1 - (1 - uniform) * b / max(sum(boundaries), 1e-9)) ** draws
                    for b in boundaries)  # fmt: skip
        among = recipe.uniform_points or max(self.lengths.tokens - recipe.min_prefix, 1)
        return exact, among * (1 - (1 - uniform / among) ** draws)

    def held_out(self, wanted: int) -> int:
        """Held-out contexts that the validation sequences give: at most two each."""
        recipe = self.recipe
        each = (recipe.compress_prompt > 0) + (recipe.compress_context > 0) or 1
        return min(wanted, each * self.validation)

    def raw_bytes(self, store: StoreKind, tokens: float) -> float:
        """Bytes of the tensors of so many tokens before compression."""
        return planned_bytes(
            self.geometry,
            dtype=self.dtype,
            tokens=round(tokens),
            store=store,
            grid=GRID if store == "importance" else 0,
            labels=len(self.stored_labels),
        )


@dataclass(frozen=True, kw_only=True)
class Plan(TrainingPlan):
    """A policy of a model."""

    model: ModelSize
    buffer: int
    """Training sequences in RAM while the model runs."""
    traced: int
    """Training sequences that run through the model where there is no store."""
    kept_points: int
    """Compression points that are kept of a sequence of the buffer, at most."""
    epochs: int = 0
    """Epochs after which a sequence of the buffer is replaced; 0 = never."""
    batch: int = 1
    """Answers that are decoded together."""

    @property
    def itemsize(self) -> int:
        """Bytes of a number of the traces."""
        return DTYPES[self.dtype][0].itemsize

    @property
    def weight_bytes(self) -> float:
        """Bytes of all weights of the model."""
        return self.model.parameters * _QUANTISED.get(self.config.quantization, self.itemsize)

    @property
    def spec(self) -> RankerSpec:
        """Rankers as far as their costs go."""
        recipe = self.recipe
        return RankerSpec(
            head_dim=self.geometry.head_dim,
            architecture=recipe.architecture,
            hidden=recipe.hidden,
            max_positions=recipe.max_positions,
            inputs=recipe.input_list,
            blocks=recipe.blocks,
            neighbours=recipe.neighbours,
        )

    @property
    def activation_bytes(self) -> float:
        """Bytes of a step's activations, of all rankers at once."""
        tokens = self.geometry.total_kv_heads * self.recipe.contexts * self.prefix
        return tokens * bytes_per_token(self.spec)

    @property
    def stores(self) -> tuple[StoreKind, ...]:
        """Stores that can be trained on: one without queries has no `recent`."""
        return ("qkv",) if self.recipe.needs_queries else ("qkv", "importance")

    def stored_bytes(self, store: StoreKind) -> int:
        """Bytes of the whole store on disk."""
        raw = self.raw_bytes(store, (self.train + self.validation) * self.lengths.tokens)
        return round(raw * COMPRESSED[self.dtype])

    @property
    def memory_gb(self) -> int:
        """The `--memory_gb` that the buffer of a running model asks for, or the given one."""
        tokens = self.config.length + self.config.max_new_tokens
        asked = self.buffer_bytes(self.buffer, tokens, self.kept_points)
        return math.ceil(max(asked / 0.75, super().memory_bytes) / 1e9)

    @property
    def memory_bytes(self) -> float:
        """RAM for what is remembered: every way is given as much as the buffer asks for."""
        return self.memory_gb * 1e9

    def buffer_bytes(self, sequences: int, tokens: int, points: float) -> float:
        """Bytes of a buffer of the running model, with the validation sequences.

        It keeps labels at the points that are drawn, or queries where those take less.
        """
        bare, queries = self.raw_bytes("kv", tokens), self.raw_bytes("qkv", tokens)
        point = 4 * self.geometry.total_kv_heads * tokens
        if self.recipe.needs_queries or bare + point * points > queries:
            return (sequences + self.validation) * queries
        held_out = self.validation * (bare + _HELD_OUT_POINTS * point)
        return sequences * (bare + point * points) + held_out
