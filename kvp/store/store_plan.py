"""Plan of a trace store, fixed when it is created: arrays, their shapes, dtypes and bytes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

from kvp.geometry import Geometry
from kvp.store.schema import (
    DTYPES,
    GRID_ARRAYS,
    GRIDS,
    TENSORS,
    SequenceRecord,
    is_label,
    label_array,
)

StoreKind = Literal["qkv", "kv", "importance"]
"""Tensors kept next to keys and values: queries, nothing, or an importance grid."""
GridDtype = Literal["float16", "float32"]
COMMON_POINTS = 4
"""Compression points at which an importance grid holds every label, at most."""


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
    """Tensors kept next to keys and values; training needs queries, which are most of the bytes, or
    an importance grid."""
    grid: int = 0
    """Compression points of an importance grid; 0 in other stores."""
    grid_dtype: GridDtype = "float16"
    """Dtype of an importance grid."""
    grid_labels: tuple[str, ...] = ()
    """Labels that the grid holds at all of its points, some of `GRIDS`; the others it holds at the
    common ones."""
    labels: tuple[str, ...] = ()
    """Labels kept for every sequence, some of `STORED_LABELS`."""

    @property
    def store_queries(self) -> bool:
        """Whether queries are kept."""
        return self.store == "qkv"

    @property
    def grid_points(self) -> dict[str, int]:
        """Label -> compression points at which the grid holds it: all or the common ones."""
        if not self.grid:
            return {}
        return {label: self.grid if label in self.grid_labels else COMMON_POINTS for label in GRIDS}

    def edges_of(self, label: str, record: SequenceRecord) -> tuple[int, ...]:
        """Where the intervals of a label's grid begin, and the end of the sequence."""
        everywhere = label in self.grid_labels
        return record.edges if everywhere else (*record.common_edges, record.length)

    @property
    def arrays(self) -> tuple[str, ...]:
        """Names of the zarr arrays."""
        tensors = TENSORS if self.store_queries else TENSORS[1:]
        grids = (GRIDS[label] for label in self.grid_points)
        return (*tensors, *grids, *(label_array(name) for name in self.labels))

    def shape(self, array: str, record: SequenceRecord | None = None) -> tuple[int, ...]:
        """One sequence of an array, as long as a record says or padded.

        [L, H, Tmax, D], q [L, H, G, Tmax, D], labels [L, H, Tmax], grids [L, H, intervals, Tmax].
        """
        size = self.geometry
        heads = (size.layers, size.kv_heads)
        if is_label(array):
            return (*heads, record.prompt_length if record else self.max_tokens)
        tokens = record.length if record else self.max_tokens
        for label, points in self.grid_points.items():
            if array == GRIDS[label]:
                kept = len(self.edges_of(label, record)) - 1 if record else points
                return (*heads, kept, tokens)
        group = (size.group,) if array == "q" else ()
        return (*heads, *group, tokens, size.head_dim)

    def dtype_of(self, array: str) -> str:
        """Name of the dtype of an array: labels are float32, tensors the store's."""
        if array in GRID_ARRAYS:
            return self.grid_dtype
        return "float32" if is_label(array) else self.dtype

    def to_dict(self) -> dict[str, Any]:
        """Plain dictionary for JSON; labels and grid only where there are any."""
        data = {**asdict(self), "geometry": self.geometry.to_dict()}
        for name in ("labels", "grid_labels"):
            data[name] = list(data[name])
            if not data[name]:
                del data[name]
        if not self.grid:
            del data["grid"], data["grid_dtype"]
        return data

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> StorePlan:
        """Inverse of `to_dict`."""
        labels = tuple(data.get("labels", ()))
        grid_labels = tuple(data["grid_labels"]) if "grid" in data else ()
        geometry = Geometry.from_dict(data["geometry"])
        return cls(**{**data, "geometry": geometry, "labels": labels, "grid_labels": grid_labels})


def planned_bytes(
    geometry: Geometry,
    *,
    dtype: str,
    tokens: int,
    store: StoreKind = "qkv",
    grid: int = 0,
    grid_dtype: GridDtype = "float16",
    grid_labels: int = 1,
    labels: int = 0,
) -> int:
    """Raw bytes of the tensors of `tokens` tokens (summed over sequences), before compression.

    `grid_labels` is how many labels the grid holds at all of its points.

    Padding compresses to nothing, so count true lengths; lossless compression then saves about a
    third of bfloat16 and little of float32.
    """
    vectors = 2 + (geometry.group if store == "qkv" else 0)
    per_head = geometry.head_dim * vectors * DTYPES[dtype][0].itemsize + 4 * labels
    if store == "importance":
        rows = grid_labels * grid + (len(GRIDS) - grid_labels) * COMMON_POINTS
        per_head += rows * DTYPES[grid_dtype][0].itemsize
    return tokens * geometry.total_kv_heads * per_head
