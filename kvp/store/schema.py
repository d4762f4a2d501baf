"""What a trace store holds: its plan, and a record and tensors per sequence.

Left out: files and codecs (`layout`), moving bytes (`writer`, `reader`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from kvp.geometry import Geometry
from kvp.store.grid import PEAK_ROWS, rows_between

FORMAT = "kvp-traces"
FORMAT_VERSION = 2
READABLE = (1, 2)
"""Format versions this kvp reads; 1 knew no importance grids."""

StoreKind = Literal["qkv", "kv", "importance"]
"""What is kept beside keys and values: queries, nothing, or an importance grid."""
GridDtype = Literal["float16", "float32"]

TENSORS = ("q", "k", "v")
LABELS = ("kvzip", "kvzip_plus")
"""Labels a store may hold: what every prompt token is worth to its KV head by another method."""
GRIDS = ("importance", "peak")
"""Arrays of an importance grid: sums and largest values of attention (`kvp.store.grid`)."""
ARRAYS = (*TENSORS, *GRIDS, *(f"label_{name}" for name in LABELS))
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
    edges: tuple[int, ...] = ()
    """Cuts of the importance grid, ascending, then T; empty in other stores."""
    peak_edges: tuple[int, ...] = ()
    """Those of the cuts whose largest attention is kept, ascending."""

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
        rising = all(one < next_one for one, next_one in pairwise((0, *self.edges)))
        if self.edges and not (rising and self.edges[-1] == self.length):
            raise ValueError(f"{self.id}: edges {self.edges} do not rise to {self.length}")
        if list(self.peak_edges) != [edge for edge in self.edges[:-1] if edge in self.peak_edges]:
            raise ValueError(f"{self.id}: peak edges {self.peak_edges} are no cuts of the grid")

    def to_dict(self) -> dict[str, Any]:
        """Plain dictionary for JSON; without edges where there is no grid."""
        data = asdict(self)
        if not self.edges:
            del data["edges"], data["peak_edges"]
        return data

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> SequenceRecord:
        """Inverse of `to_dict`; raises TypeError or ValueError on foreign content."""
        return cls(
            **{
                **data,
                "token_ids": tuple(data["token_ids"]),
                "reply_spans": tuple((start, stop) for start, stop in data["reply_spans"]),
                "references": tuple(data["references"]),
                "edges": tuple(data.get("edges", ())),
                "peak_edges": tuple(data.get("peak_edges", ())),
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
    importance: Tensor | None = None
    """[L, H, cuts, T] float32, a row per interval of `record.edges`: the attention that tokens get
    from its queries (`kvp.store.grid`); None in a store without a grid."""
    peak: Tensor | None = None
    """[L, H, peak cuts, T] float32: likewise the largest, one row per `record.peak_edges`."""

    def future_attention(self, cut: int) -> Tensor:
        """What the grid says of one of its cuts, [L, H, cut] float32; ValueError for others."""
        assert self.importance is not None, "a trace with queries has no grid"
        rows = rows_between(self.record.edges, cut, self.record.length)
        total: Tensor = self.importance[..., rows, :cut].sum(dim=-2)
        return total


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
    store: StoreKind = "qkv"
    """What is kept beside keys and values; training needs queries, which are most of the bytes, or
    an importance grid."""
    grid: int = 0
    """Cuts of an importance grid; 0 in other stores."""
    grid_dtype: GridDtype = "float16"
    """What an importance grid is stored in."""
    labels: tuple[str, ...] = ()
    """Labels kept for every sequence, some of `LABELS`."""

    def __post_init__(self) -> None:
        """Raise ValueError on an unknown dtype, store or label, or an empty store."""
        if unknown := [name for name in self.labels if name not in LABELS]:
            raise ValueError(f"label {unknown[0]!r} is none of {', '.join(LABELS)}")
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype {self.dtype!r} is none of {', '.join(DTYPES)}")
        if min(self.max_tokens, self.sequences) < 1:
            raise ValueError(f"a store holds at least one sequence of one token, got {self}")
        if self.store not in get_args(StoreKind) or self.grid_dtype not in get_args(GridDtype):
            raise ValueError(f"no store {self.store!r} with a grid of {self.grid_dtype!r}")
        if (self.store == "importance") != (self.grid > 0):
            raise ValueError(f"a grid belongs to stores of importance, got {self}")

    @property
    def store_queries(self) -> bool:
        """Whether queries are kept."""
        return self.store == "qkv"

    @property
    def arrays(self) -> tuple[str, ...]:
        """Names of the zarr arrays."""
        tensors = TENSORS if self.store_queries else TENSORS[1:]
        grids = GRIDS if self.store == "importance" else ()
        return (*tensors, *grids, *(label_array(name) for name in self.labels))

    def shape(self, array: str, record: SequenceRecord | None = None) -> tuple[int, ...]:
        """One sequence of an array, as long as a record says or padded.

        [L, H, Tmax, D], q [L, H, G, Tmax, D], labels [L, H, Tmax], grids [L, H, rows, Tmax].
        """
        size = self.geometry
        heads = (size.layers, size.kv_heads)
        if is_label(array):
            return (*heads, record.prompt_length if record else self.max_tokens)
        tokens = record.length if record else self.max_tokens
        if array == "importance":
            return (*heads, len(record.edges) - 1 if record else self.grid, tokens)
        if array == "peak":
            return (*heads, len(record.peak_edges) if record else PEAK_ROWS, tokens)
        group = (size.group,) if array == "q" else ()
        return (*heads, *group, tokens, size.head_dim)

    def dtype_of(self, array: str) -> str:
        """Name of the dtype of an array: labels are float32, tensors the store's."""
        if array in GRIDS:
            return self.grid_dtype
        return "float32" if is_label(array) else self.dtype

    def to_dict(self) -> dict[str, Any]:
        """Plain dictionary for JSON; labels and grid only where there are any."""
        data = asdict(self)
        if not self.labels:
            del data["labels"]
        if not self.grid:
            del data["grid"], data["grid_dtype"]
        return {key: list(value) if key == "labels" else value for key, value in data.items()}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> StorePlan:
        """Inverse of `to_dict`, also for version 1; TypeError or ValueError on foreign content."""
        known = dict(data)
        if "store_queries" in known:
            known["store"] = "qkv" if known.pop("store_queries") else "kv"
        labels = tuple(known.pop("labels", ()))
        return cls(**{**known, "geometry": Geometry.from_dict(data["geometry"]), "labels": labels})


def label_array(name: str) -> str:
    """Name of the array that holds a label."""
    return f"label_{name}"


def is_label(array: str) -> bool:
    """Whether an array holds a label."""
    return array.startswith("label_")


def planned_bytes(
    geometry: Geometry,
    *,
    dtype: str,
    tokens: int,
    store: StoreKind = "qkv",
    grid: int = 0,
    grid_dtype: GridDtype = "float16",
    labels: int = 0,
) -> int:
    """Raw bytes of the tensors of `tokens` tokens (summed over sequences), before compression.

    Padding compresses to nothing, so count true lengths; lossless compression then saves about a
    third of bfloat16 and little of float32.
    """
    vectors = 2 + (geometry.group if store == "qkv" else 0)
    per_head = geometry.head_dim * vectors * DTYPES[dtype][0].itemsize + 4 * labels
    if store == "importance":
        per_head += (grid + PEAK_ROWS) * DTYPES[grid_dtype][0].itemsize
    return tokens * geometry.agents * per_head
