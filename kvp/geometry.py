"""Head geometry of a model, and the letters every shape in kvp is written with.

Shape legend (used in docstrings and typed signatures throughout):

    B  batch                        L  layers that tokens are evicted from
    Q  query heads                  H  KV heads
    G  query heads per KV head      A  KV heads of the model, L * H, layer-major: one learned ranker
                                       each (the "agents" of the KVP paper)
    N  tokens in the cache when it is compressed
    T  tokens of a whole sequence   F  future tokens, T - N
    W  recent queries               S  cache slots after eviction
    D  head dimension               K  sampled permutations
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any, Literal

DtypeName = Literal["float32", "bfloat16", "float16"]
"""Values of --dtype: what a model computes in."""


@dataclass(frozen=True, kw_only=True)
class Geometry:
    """Attention shape of a decoder: everything a trace or a policy must agree on."""

    layers: int
    """Layers that see every token, from which tokens are evicted: all layers of most models."""
    query_heads: int
    kv_heads: int
    head_dim: int
    layer_indices: tuple[int, ...] = ()
    """Which layers of the model those are, ascending; empty where they are its first ones."""

    def __post_init__(self) -> None:
        indices = tuple(self.layer_indices)
        sizes = (self.layers, self.query_heads, self.kv_heads, self.head_dim)
        if {*map(type, (*sizes, *indices))} != {int} or max(sizes) > 2**20:
            raise ValueError(
                f"every size of a geometry must be an integer up to 2**20, got {sizes}"
            )
        rises = all(low < high for low, high in pairwise((-1, *indices)))
        if indices and (len(indices) != self.layers or not rises):
            raise ValueError(f"{self.layers} layers cannot be layers {indices} of a model")
        first = indices == tuple(range(len(indices)))
        object.__setattr__(self, "layer_indices", () if first else indices)
        if min(sizes) < 1:
            raise ValueError(f"every size of a geometry must be positive, got {self}")
        if self.query_heads % self.kv_heads:
            raise ValueError(
                f"{self.query_heads} query heads do not share {self.kv_heads} KV heads evenly"
            )

    @property
    def group(self) -> int:
        """Query heads per KV head (G)."""
        return self.query_heads // self.kv_heads

    @property
    def total_kv_heads(self) -> int:
        """KV heads of the whole model (A = L * H)."""
        return self.layers * self.kv_heads

    @property
    def model_layers(self) -> Sequence[int]:
        """[L] index in the model of every layer that tokens are evicted from."""
        return self.layer_indices or range(self.layers)

    def to_dict(self) -> dict[str, Any]:
        """Plain dictionary for JSON, without the layer indices where they are the first ones."""
        data = asdict(self)
        indices = list(data.pop("layer_indices"))
        return {**data, "layer_indices": indices} if indices else data

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Geometry:
        """Inverse of `to_dict`; raises TypeError on missing or unknown keys."""
        return cls(**data)

    def __str__(self) -> str:
        which = f", layers {', '.join(map(str, self.layer_indices))}" if self.layer_indices else ""
        return (
            f"{self.layers} layers x {self.kv_heads} KV heads "
            f"({self.query_heads} query heads, head_dim {self.head_dim}{which})"
        )
