"""Schema of a trace store: its plan, and a record and tensors per sequence."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

import torch
from pydantic import StrictInt, StrictStr, TypeAdapter
from torch import Tensor

from kvp.artifacts.manifest import Format
from kvp.geometry import Geometry
from kvp.training_names import STORED_LABELS

FORMAT = Format("kvp-traces", 3)

DTYPES: dict[str, tuple[torch.dtype, str]] = {
    "float32": (torch.float32, "float32"),
    "float16": (torch.float16, "float16"),
    "bfloat16": (torch.bfloat16, "uint16"),  # zarr has none: its 16 bits are kept as they are
}
"""Name of a trace dtype -> (torch dtype, stored zarr dtype)."""


@dataclass(frozen=True, kw_only=True)
class SequenceRecord:
    """Everything a store keeps about one sequence next to its tensors.

    0 < context_length <= prompt_length <= length; tokens are as fed, with the chat template.
    """

    index: StrictInt
    """Position on the sequence axis of the arrays."""
    id: StrictStr
    """Name of the sample, unique in the store."""
    task: StrictStr
    split: StrictStr
    """train, validation or test."""
    length: StrictInt
    """T, tokens: prompt and continuation."""
    context_length: StrictInt
    """Tokens up to the end of the context: the query_agnostic boundary."""
    prompt_length: StrictInt
    """Tokens up to the end of the prompt, answer prefix included."""
    token_ids: tuple[StrictInt, ...] = field(repr=False)
    reply_spans: tuple[tuple[StrictInt, StrictInt], ...] = ()
    """[start, stop) token ranges written by the assistant."""
    shards: Mapping[str, str] = field(default_factory=dict, repr=False, compare=False)
    """Array -> checksums of the chunks of its shard (`kvp.store.shards`), once it is written."""

    def fed_again(self, prefix_length: int) -> int:
        """Tokens after a prefix that scorers see: the prompt's last one, where it comes next."""
        return int(prefix_length == self.prompt_length - 1)

    def __post_init__(self) -> None:
        if len(self.token_ids) != self.length:
            raise ValueError(f"{self.id}: {len(self.token_ids)} ids for {self.length} tokens")
        if not 0 < self.context_length <= self.prompt_length <= self.length:
            raise ValueError(
                f"{self.id}: boundaries {self.context_length} <= {self.prompt_length} <= "
                f"{self.length} do not hold"
            )

    def to_dict(self) -> dict[str, Any]:
        """Plain dictionary for JSON, without the checksums of a store's files."""
        return {name: value for name, value in asdict(self).items() if name != "shards"}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> SequenceRecord:
        """Inverse of `to_dict`; ValueError where an entry is of another type."""
        return _RECORD.validate_python(data)


_RECORD = TypeAdapter(SequenceRecord)


@dataclass(frozen=True, kw_only=True)
class Trace:
    """One sequence: its record and its unpadded tensors, in the store's dtype."""

    record: SequenceRecord
    queries: Tensor
    """[L, H, G, T, D] queries after RoPE."""
    keys: Tensor
    """[L, H, T, D] keys after RoPE."""
    values: Tensor
    """[L, H, T, D] values."""
    labels: Mapping[str, Tensor] = field(default_factory=dict)
    """Name -> [L, H, P] float32, P = `record.prompt_length`; those of the store's plan."""


def label_array(name: str) -> str:
    """Name of the array that holds a label."""
    return f"label_{name}"


def is_label(array: str) -> bool:
    """Whether an array holds a label."""
    return array.startswith("label_")


@dataclass(frozen=True, kw_only=True)
class StorePlan:
    """Properties of a store that are fixed when it is created."""

    geometry: Geometry
    dtype: str
    """A key of `DTYPES`."""
    max_tokens: int
    """Longest sequence the store can hold, tokens."""
    sequences: int
    store: Literal["qkv"] = "qkv"
    """Tensors kept, by the letters of their arrays: queries, keys and values."""
    labels: tuple[str, ...] = ()
    """Labels kept for every sequence, some of `STORED_LABELS`."""

    @property
    def arrays(self) -> tuple[str, ...]:
        """Names of the zarr arrays."""
        return (*self.store, *(label_array(name) for name in self.labels))

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
        """Inverse of `to_dict`; ValueError where no store on a disk has such a plan."""
        labels = tuple(data.get("labels", ()))
        plan = cls(**{**data, "geometry": Geometry.from_dict(data["geometry"]), "labels": labels})
        known = plan.dtype in DTYPES and set(labels) <= set(STORED_LABELS)
        if not (known and plan.store == "qkv"):
            raise ValueError("no store holds such arrays")
        return plan


def planned_bytes(geometry: Geometry, *, dtype: str, tokens: int, labels: int = 0) -> int:
    """Raw bytes of the tensors of `tokens` tokens (summed over sequences), before compression.

    Padding compresses to nothing, so count true lengths; lossless compression then saves about a
    third of bfloat16 and little of float32.
    """
    per_head = geometry.head_dim * (2 + geometry.group) * DTYPES[dtype][0].itemsize + 4 * labels
    return tokens * geometry.total_kv_heads * per_head
