"""What a run trains on, from a store or from a running model: traces, and which of them when."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from kvp.errors import UsageError
from kvp.manifest import digest_json
from kvp.store import SequenceRecord, TraceReader
from train.config import TrainConfig
from train.cuts import Rolling
from train.presets import Recipe
from train.store import check_store, usable
from train.traces import Traces


class Material(Protocol):
    """Traces with the sequences to train and to validate on."""

    @property
    def traces(self) -> Traces:
        """Tensors by sequence."""

    @property
    def training(self) -> Sequence[SequenceRecord] | Rolling:
        """Sequences to draw contexts from."""

    @property
    def first(self) -> Sequence[SequenceRecord]:
        """Sequences that tell what training tokens are like: the training ones, as a rule."""

    @property
    def validation(self) -> Sequence[SequenceRecord]:
        """Sequences to judge on."""

    @property
    def identity(self) -> dict[str, Any]:
        """What tells this material from another, wherever it comes from; JSON."""


@dataclass(frozen=True, kw_only=True)
class StoreMaterial:
    """What a trace store gives."""

    traces: TraceReader
    training: list[SequenceRecord]
    validation: list[SequenceRecord]

    @property
    def first(self) -> list[SequenceRecord]:
        """The training sequences."""
        return self.training

    @property
    def identity(self) -> dict[str, Any]:
        """What tells one store from another, wherever it lies."""
        reader, records = self.traces, (*self.training, *self.validation)
        return {
            "geometry": reader.geometry.to_dict(),
            "store": digest_json([reader.manifest["identity"], reader.plan.to_dict()]),
            "sequences": digest_json([record.to_dict() for record in records]),
            "train": len(self.training),
            "validation": len(self.validation),
        }


def open_store(config: TrainConfig, recipe: Recipe, heads: range | None = None) -> StoreMaterial:
    """Check the store of a run; with `heads`, agents of the model, only theirs is read.

    Raises:
        StoreError: the store is damaged, incomplete or holds nothing to train or validate on.
        UsageError: it has fewer sequences than asked for.
    """
    assert config.traces is not None, "checked by the configuration"
    agents = None if heads is None else slice(heads.start, heads.stop)
    reader = TraceReader(Path(config.traces), agents=agents)
    check_store(reader, recipe, allow_incomplete=config.allow_incomplete)
    training = _first(usable(reader, "train", recipe), recipe.sequences)
    return StoreMaterial(
        traces=reader, training=training, validation=usable(reader, "validation", recipe)
    )


def _first(records: list[SequenceRecord], count: int) -> list[SequenceRecord]:
    """The first `count` records, all for 0."""
    if count > len(records):
        raise UsageError(
            f"--sequences {count}: the store has {len(records)} training sequences that can be cut"
        )
    return records[: count or None]
