"""What a trace store holds: its plan, and a record and tensors per sequence.

Left out: files and codecs (`layout`), moving bytes (`writer`, `reader`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor

from kvp.geometry import Geometry

FORMAT = "kvp-traces"
FORMAT_VERSION = 1

TENSORS = ("q", "k", "v")
LABELS = ("kvzip", "kvzip_plus")
"""Labels a store may hold: what every prompt token is worth to its KV head by another method."""
ARRAYS = (*TENSORS, *(f"label_{name}" for name in LABELS))
"""Every array a store may have."""

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
    labels: Mapping[str, Tensor] = field(default_factory=dict)
    """Name -> [L, H, P] float32, P = `record.prompt_length`; those of the store's plan."""


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
    labels: tuple[str, ...] = ()
    """Labels kept for every sequence, some of `LABELS`."""

    def __post_init__(self) -> None:
        """Raise ValueError on an unknown dtype or label, or an empty store."""
        if unknown := [name for name in self.labels if name not in LABELS]:
            raise ValueError(f"label {unknown[0]!r} is none of {', '.join(LABELS)}")
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype {self.dtype!r} is none of {', '.join(DTYPES)}")
        if min(self.max_tokens, self.sequences) < 1:
            raise ValueError(f"a store holds at least one sequence of one token, got {self}")

    @property
    def arrays(self) -> tuple[str, ...]:
        """Names of the zarr arrays."""
        tensors = TENSORS if self.store_queries else TENSORS[1:]
        return (*tensors, *(label_array(name) for name in self.labels))

    def shape(self, array: str) -> tuple[int, ...]:
        """One sequence of an array: [L, H, Tmax, D], q [L, H, G, Tmax, D], labels [L, H, Tmax]."""
        size = self.geometry
        if is_label(array):
            return (size.layers, size.kv_heads, self.max_tokens)
        group = (size.group,) if array == "q" else ()
        return (size.layers, size.kv_heads, *group, self.max_tokens, size.head_dim)

    def dtype_of(self, array: str) -> str:
        """Name of the dtype of an array: labels are float32, tensors the store's."""
        return "float32" if is_label(array) else self.dtype

    def to_dict(self) -> dict[str, Any]:
        """Plain dictionary for JSON; without labels, as it was before there were any."""
        data = asdict(self)
        labels = data.pop("labels")
        return {**data, "labels": list(labels)} if labels else data

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> StorePlan:
        """Inverse of `to_dict`; raises TypeError or ValueError on foreign content."""
        labels = tuple(data.get("labels", ()))
        geometry = Geometry.from_dict(data["geometry"])
        return cls(**{**data, "geometry": geometry, "labels": labels})


def label_array(name: str) -> str:
    """Name of the array that holds a label."""
    return f"label_{name}"


def is_label(array: str) -> bool:
    """Whether an array holds a label."""
    return array.startswith("label_")


def planned_bytes(
    geometry: Geometry, *, dtype: str, tokens: int, store_queries: bool = True, labels: int = 0
) -> int:
    """Raw bytes of the tensors of `tokens` tokens (summed over sequences), before compression.

    Padding compresses to nothing, so count true lengths; lossless compression then saves about a
    third of bfloat16 and little of float32.
    """
    vectors = 2 + (geometry.group if store_queries else 0)
    per_head = geometry.head_dim * vectors * DTYPES[dtype][0].itemsize + 4 * labels
    return tokens * geometry.agents * per_head
