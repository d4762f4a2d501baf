"""What a trace store holds: its plan, and a record and tensors per sequence.

Left out: files and codecs (`layout`), moving bytes (`writer`, `reader`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from kvp.geometry import Geometry

FORMAT = "kvp-traces"
FORMAT_VERSION = 1

ARRAYS = ("q", "k", "v")

DTYPES: dict[str, tuple[torch.dtype, str]] = {
    "float32": (torch.float32, "float32"),
    "float16": (torch.float16, "float16"),
    "bfloat16": (
        torch.bfloat16,
        "uint16",
    ),  # zarr has no bfloat16; its 16 bits are kept as they are
}
"""Name of a trace dtype -> (torch dtype, stored zarr dtype)."""


@dataclass(frozen=True, kw_only=True)
class SequenceRecord:
    """Everything a store keeps about one sequence beside its tensors.

    0 < context_length <= prompt_length <= length; tokens are those the model was fed, with chat
    template.
    """

    index: int
    """Position on the sequence axis of the arrays."""
    id: str
    """Name of the sample, unique in the store."""
    task: str
    """Task or data set the sample belongs to."""
    split: str
    """train, validation or test."""
    length: int
    """T, tokens: prompt and continuation."""
    context_length: int
    """Tokens up to the end of the context: the query_agnostic boundary."""
    prompt_length: int
    """Tokens up to the end of the prompt, answer prefix included."""
    token_ids: tuple[int, ...]
    """T token ids."""
    reply_spans: tuple[tuple[int, int], ...] = ()
    """[start, stop) token ranges written by the assistant."""
    references: tuple[str, ...] = ()
    """Expected answers, for tasks that have them."""
    max_new_tokens: int = 0
    """Tokens an answer may take."""
    metric: str = ""
    """Name of the metric that scores an answer."""

    def __post_init__(self) -> None:
        """Raise ValueError when lengths, boundaries or spans contradict each other."""
        if len(self.token_ids) != self.length:
            raise ValueError(f"{self.id}: {len(self.token_ids)} ids for {self.length} tokens")
        if not 0 < self.context_length <= self.prompt_length <= self.length:
            raise ValueError(
                f"{self.id}: boundaries {self.context_length} <= {self.prompt_length} <= "
                f"{self.length} do not hold"
            )
        for start, stop in self.reply_spans:
            if not 0 <= start < stop <= self.length:
                raise ValueError(f"{self.id}: reply span [{start}, {stop}) is not in the sequence")

    def to_dict(self) -> dict[str, Any]:
        """Plain dictionary for JSON."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> SequenceRecord:
        """Inverse of `to_dict`; raises TypeError or ValueError on foreign content."""
        return cls(
            **{
                **data,
                "token_ids": tuple(data["token_ids"]),
                "reply_spans": tuple((start, stop) for start, stop in data["reply_spans"]),
                "references": tuple(data["references"]),
            }
        )


@dataclass(frozen=True, kw_only=True)
class Trace:
    """One sequence: its record and its unpadded tensors, in the store's dtype."""

    record: SequenceRecord
    queries: Tensor | None
    """[L, H, G, T, D] queries after RoPE; None in a store without queries."""
    keys: Tensor
    """[L, H, T, D] keys after RoPE."""
    values: Tensor
    """[L, H, T, D] values."""


@dataclass(frozen=True, kw_only=True)
class StorePlan:
    """What is fixed when a store is created."""

    geometry: Geometry
    dtype: str
    """A key of `DTYPES`."""
    max_tokens: int
    """Longest sequence the store can hold, tokens."""
    sequences: int
    """Planned sequences."""
    store_queries: bool = True
    """Whether queries are kept; training needs them, they are most of the bytes."""

    def __post_init__(self) -> None:
        """Raise ValueError on an unknown dtype or an empty store."""
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype {self.dtype!r} is none of {', '.join(DTYPES)}")
        if min(self.max_tokens, self.sequences) < 1:
            raise ValueError(f"a store holds at least one sequence of one token, got {self}")

    @property
    def arrays(self) -> tuple[str, ...]:
        """Names of the zarr arrays."""
        return ARRAYS if self.store_queries else ARRAYS[1:]

    def shape(self, array: str) -> tuple[int, ...]:
        """Shape of one sequence in an array: [L, H, Tmax, D] or [L, H, G, Tmax, D]."""
        size = self.geometry
        group = (size.group,) if array == "q" else ()
        return (size.layers, size.kv_heads, *group, self.max_tokens, size.head_dim)

    def to_dict(self) -> dict[str, Any]:
        """Plain dictionary for JSON."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> StorePlan:
        """Inverse of `to_dict`; raises TypeError or ValueError on foreign content."""
        return cls(**{**data, "geometry": Geometry.from_dict(data["geometry"])})


def planned_bytes(
    geometry: Geometry, *, dtype: str, tokens: int, store_queries: bool = True
) -> int:
    """Raw bytes of the tensors of `tokens` tokens (summed over sequences), before compression.

    Padding compresses to nothing, so count true lengths; lossless compression then saves about a
    third of bfloat16 and little of float32.
    """
    vectors = 2 + (geometry.group if store_queries else 0)
    per_token = geometry.agents * geometry.head_dim * vectors * DTYPES[dtype][0].itemsize
    return tokens * per_token
