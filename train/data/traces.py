"""Interface of traces for training; they come from a store or from a model that runs first."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from torch import Tensor

from kvp.geometry import Geometry
from kvp.store import SequenceRecord, StorePlan, Trace


class Traces(Protocol):
    """Traces by sequence; `kvp.store.TraceReader` documents shapes and errors."""

    @property
    def in_memory(self) -> bool:
        """Whether all tensors lie in RAM anyway, so that nobody else needs to remember any."""

    @property
    def geometry(self) -> Geometry:
        """Head geometry of the model."""

    @property
    def plan(self) -> StorePlan:
        """Tensors kept per sequence: queries, or attention in their place."""

    @property
    def manifest(self) -> dict[str, Any]:
        """Where the traces come from; the entry "model" names the model."""

    def record(self, index: int) -> SequenceRecord:
        """Lengths, boundaries and tokens of one sequence."""

    def kv(self, index: int) -> tuple[Tensor, Tensor]:
        """Keys and values."""

    def trace(self, index: int) -> Trace:
        """All of one sequence, with queries where the plan keeps them."""

    def label(self, name: str, index: int) -> Tensor:
        """A label of the prompt that was stored with the trace."""

    def importance(
        self, label: str, index: int, prefix_length: int, stop: int | None = None
    ) -> Tensor | None:
        """Importance kept in place of queries: a label at a compression point, [L, H, N].

        None where queries are kept, and in stores.
        """

    def output_gram(self) -> Tensor | None:
        """Gram matrices of the model's output projection."""


def recorded_text(manifest: Mapping[str, Any]) -> dict[str, Any]:
    """What traces were taken of: `data` (names, length, sequences), `answers` and `command`."""
    identity = manifest.get("identity", {})
    found = {
        "data": identity.get("data"),
        "answers": identity.get("continuation"),
        "command": manifest.get("command"),
    }
    return {name: value for name, value in found.items() if value is not None}


def recorded_model(manifest: Mapping[str, Any]) -> dict[str, str | None]:
    """Name, revision and digests of the model that traces come from, as far as they are recorded.

    Policies carry it, so that a user is warned where another model of the same heads is meant.
    """
    return {**manifest["model"], **manifest.get("identity", {}).get("model", {})}
