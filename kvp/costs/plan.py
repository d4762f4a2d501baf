"""What is to be made: a model, sequences, rankers and their training, and bytes that follow."""

from __future__ import annotations

import math
from dataclasses import dataclass

from kvp.costs.sizes import Lengths, ModelSize, RankerSize, TrainingSize
from kvp.store import GridDtype, StoreKind, planned_bytes
from kvp.store.schema import DTYPES

COMPRESSED = {"float32": 0.9, "float16": 0.7, "bfloat16": 0.7}
"""Share of the raw bytes that compression leaves, cautiously; 16-bit traces measured 0.69."""
_QUANTISED = {"8bit": 1.0, "4bit": 0.5}
"""Bytes per quantised weight."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A policy that is to be trained."""

    model: ModelSize
    dtype: str
    lengths: Lengths
    max_tokens: int
    """Longest possible sequence."""
    train: int
    validation: int
    ranker: RankerSize
    training: TrainingSize
    buffer: int
    """Training sequences in RAM while the model runs."""
    traced: int
    """Training sequences that run through the model where there is no store."""
    points: int
    """Compression points that are kept of a sequence of the buffer, at most."""
    leaving: int = 0
    """Training sequences held beside those of the buffer, since a process of several may be behind
    the others."""
    epochs: int = 0
    """Epochs after which a sequence of the buffer is replaced; 0 = never."""
    quantization: str = "none"
    """Of the model's weights, as `--quantization`."""
    grid: int = 48
    grid_dtype: GridDtype = "float16"
    grid_labels: int = 1
    """Labels that the grid holds at all of its points."""
    labels: int = 0
    """Labels that are stored with traces."""
    batch: int = 1
    """Answers that are decoded together."""

    @property
    def itemsize(self) -> int:
        """Bytes of a number of `dtype`."""
        return DTYPES[self.dtype][0].itemsize

    @property
    def weight_bytes(self) -> float:
        """Bytes of all weights of the model."""
        return self.model.parameters * _QUANTISED.get(self.quantization, self.itemsize)

    @property
    def heads(self) -> int:
        """A, KV heads and rankers."""
        return self.model.geometry.total_kv_heads

    @property
    def sequences(self) -> int:
        """Sequences of both splits."""
        return self.train + self.validation

    @property
    def recomputed(self) -> bool:
        """Whether activations of a step are computed a second time in the backward pass."""
        return self.activation_bytes > self.training.activation_bytes

    @property
    def activation_bytes(self) -> float:
        """Bytes of a step's activations, of all rankers at once."""
        tokens = self.training.contexts * self.training.prefix(self.lengths)
        return self.heads * tokens * self.ranker.token_bytes

    @property
    def memory_bytes(self) -> float:
        """RAM that every way may use to remember sequences."""
        return self.memory_gb * 1e9

    def raw_bytes(self, store: StoreKind, tokens: int) -> int:
        """Bytes of the tensors of so many tokens before compression."""
        return planned_bytes(
            self.model.geometry,
            dtype=self.dtype,
            tokens=tokens,
            store=store,
            grid=self.grid if store == "importance" else 0,
            grid_dtype=self.grid_dtype,
            grid_labels=self.grid_labels,
            labels=self.labels,
        )

    def stored_bytes(self, store: StoreKind) -> int:
        """Bytes of the whole store on disk."""
        raw = self.raw_bytes(store, self.sequences * self.lengths.tokens)
        return round(raw * COMPRESSED[self.dtype])

    @property
    def buffer_bound(self) -> int:
        """Bytes for which kvp-train asks three quarters of `--memory_gb` with `--source model`."""
        bare = self.raw_bytes("kv", self.max_tokens)
        point = 4 * self.heads * self.max_tokens
        with_points, queries = bare + point * self.points, self.raw_bytes("qkv", self.max_tokens)
        if with_points > queries:
            return (self.buffer + self.leaving + self.validation) * queries
        return (self.buffer + self.leaving) * with_points + self.validation * (bare + 6 * point)

    @property
    def memory_gb(self) -> int:
        """The `--memory_gb` that the buffer of a running model asks for, or the given one."""
        return math.ceil(max(self.buffer_bound / 0.75, self.training.memory_bytes) / 1e9)
