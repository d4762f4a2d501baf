"""Plan of a trace store, fixed when it is created: arrays, their shapes, dtypes and bytes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

from kvp.geometry import Geometry
from kvp.store.schema import DTYPES, TENSORS, SequenceRecord, is_label, label_array

StoreKind = Literal["qkv", "kv"]
"""Tensors kept: queries, keys and values, or keys and values alone."""


@dataclass(frozen=True, kw_only=True)
class StorePlan:
    """Properties of a store that are fixed when it is created."""

    geometry: Geometry
    dtype: str
    """A key of `DTYPES`."""
    max_tokens: int
    """Longest sequence the store can hold, tokens."""
    sequences: int
    """Planned sequences."""
    store: StoreKind = "qkv"
    """Tensors kept; labels are computed from queries, which are most of the bytes."""
    labels: tuple[str, ...] = ()
    """Labels kept for every sequence, some of `STORED_LABELS`."""

    @property
    def store_queries(self) -> bool:
        """Whether queries are kept."""
        return self.store == "qkv"

    @property
    def arrays(self) -> tuple[str, ...]:
        """Names of the zarr arrays."""
        tensors = TENSORS if self.store_queries else TENSORS[1:]
        return (*tensors, *(label_array(name) for name in self.labels))

    def shape(self, array: str, record: SequenceRecord | None = None) -> tuple[int, ...]:
        """One sequence of an array, as long as a record says or padded.

        [L, H, Tmax, D], q [L, H, G, Tmax, D], labels [L, H, Tmax].
        """
        size = self.geometry
        heads = (size.layers, size.kv_heads)
        if is_label(array):
            return (*heads, record.prompt_length if record else self.max_tokens)
        tokens = record.length if record else self.max_tokens
        group = (size.group,) if array == "q" else ()
        return (*heads, *group, tokens, size.head_dim)

    def dtype_of(self, array: str) -> str:
        """Name of the dtype of an array: labels are float32, tensors the store's."""
        return "float32" if is_label(array) else self.dtype

    def to_dict(self) -> dict[str, Any]:
        """Plain dictionary for JSON; labels only where there are any."""
        data = {**asdict(self), "geometry": self.geometry.to_dict(), "labels": list(self.labels)}
        if not self.labels:
            del data["labels"]
        return data

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> StorePlan:
        """Inverse of `to_dict`."""
        labels = tuple(data.get("labels", ()))
        return cls(**{**data, "geometry": Geometry.from_dict(data["geometry"]), "labels": labels})


def planned_bytes(
    geometry: Geometry,
    *,
    dtype: str,
    tokens: int,
    store: StoreKind = "qkv",
    labels: int = 0,
) -> int:
    """Raw bytes of the tensors of `tokens` tokens (summed over sequences), before compression.

    Padding compresses to nothing, so count true lengths; lossless compression then saves about a
    third of bfloat16 and little of float32.
    """
    vectors = 2 + (geometry.group if store == "qkv" else 0)
    per_head = geometry.head_dim * vectors * DTYPES[dtype][0].itemsize + 4 * labels
    return tokens * geometry.total_kv_heads * per_head
