"""Head geometry of a model, and the letters every shape in kvp is written with.

Shape legend (used in docstrings and typed signatures throughout):

    B  batch                        L  layers
    Q  query heads                  H  KV heads
    G  query heads per KV head      A  KV heads of the model, L * H, layer-major: one learned ranker
                                       each (the "agents" of the KVP paper)
    N  tokens in the cache when it is compressed
    T  tokens of a whole sequence   F  future tokens, T - N
    W  recent queries               S  cache slots after eviction
    D  head dimension               K  sampled permutations
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Geometry:
    """Attention shape of a decoder: everything a trace or a policy must agree on."""

    layers: int
    query_heads: int
    kv_heads: int
    head_dim: int

    def __post_init__(self) -> None:
        """Raise ValueError unless all sizes are positive and KV heads divide the query heads."""
        if min(self.layers, self.query_heads, self.kv_heads, self.head_dim) < 1:
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

    def to_dict(self) -> dict[str, int]:
        """Plain dictionary for JSON."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Geometry:
        """Inverse of `to_dict`; raises TypeError on missing or unknown keys."""
        return cls(**data)

    def __str__(self) -> str:
        return (
            f"{self.layers} layers x {self.kv_heads} KV heads "
            f"({self.query_heads} query heads, head_dim {self.head_dim})"
        )
