"""Schema of a trace store: a record and tensors per sequence.

Left out: the plan (`store_plan`), paths and codecs (`paths`), reading and writing (`reader`,
`writer`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor

FORMAT = "kvp-traces"
FORMAT_VERSION = 3

TENSORS = ("q", "k", "v")
STORED_LABELS = ("kvzip", "kvzip_plus")
"""Labels a store may hold: importance of every prompt token by another method."""
ARRAYS = (*TENSORS, *(f"label_{name}" for name in STORED_LABELS))
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
    """Everything a store keeps about one sequence next to its tensors.

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
    token_ids: tuple[int, ...] = field(repr=False)
    """T token ids."""
    reply_spans: tuple[tuple[int, int], ...] = ()
    """[start, stop) token ranges written by the assistant."""
    references: tuple[str, ...] = ()
    """Expected answers, for tasks that have them."""
    max_new_tokens: int = 0
    """Tokens an answer may take."""
    metric: str = ""
    """Name of the metric that scores an answer."""

    def fed_again(self, prefix_length: int) -> int:
        """Tokens after a prefix that scorers see: the prompt's last one, where it comes next."""
        return int(prefix_length == self.prompt_length - 1)

    def __post_init__(self) -> None:
        """Raise ValueError when lengths and boundaries contradict each other."""
        if len(self.token_ids) != self.length:
            raise ValueError(f"{self.id}: {len(self.token_ids)} ids for {self.length} tokens")
        if not 0 < self.context_length <= self.prompt_length <= self.length:
            raise ValueError(
                f"{self.id}: boundaries {self.context_length} <= {self.prompt_length} <= "
                f"{self.length} do not hold"
            )

    def to_dict(self) -> dict[str, Any]:
        """Plain dictionary for JSON."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> SequenceRecord:
        """Inverse of `to_dict`."""
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


def label_array(name: str) -> str:
    """Name of the array that holds a label."""
    return f"label_{name}"


def is_label(array: str) -> bool:
    """Whether an array holds a label."""
    return array.startswith("label_")
