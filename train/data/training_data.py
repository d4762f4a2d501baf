"""Training data of a run, from a store or from a running model: traces and their order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from kvp.artifacts.addresses import place
from kvp.errors import UsageError
from kvp.manifest import digest_json
from kvp.store import SequenceRecord, TraceReader
from train.config import TrainConfig
from train.data.store_checks import check_label, check_store, usable
from train.data.traces import Traces
from train.distributed import Workers
from train.head_range import heads_within, parse_heads
from train.recipe import Recipe


class TrainingData(Protocol):
    """Traces with the sequences to train and to validate on."""

    @property
    def traces(self) -> Traces:
        """Tensors by sequence."""

    @property
    def training(self) -> Sequence[SequenceRecord]:
        """Sequences to draw contexts from."""

    @property
    def validation(self) -> Sequence[SequenceRecord]:
        """Sequences to validate on."""

    @property
    def identity(self) -> dict[str, Any]:
        """Identity of the training data, independent of where it is stored; JSON."""


@dataclass(frozen=True, kw_only=True)
class StoreTrainingData:
    """Training data from a trace store."""

    traces: TraceReader
    training: list[SequenceRecord]
    validation: list[SequenceRecord]

    @property
    def identity(self) -> dict[str, Any]:
        """Identity of the store and of the sequences used, independent of its path."""
        reader, records = self.traces, (*self.training, *self.validation)
        return {
            "geometry": reader.geometry.to_dict(),
            "store": digest_json([reader.manifest["identity"], reader.plan.to_dict()]),
            "sequences": digest_json([record.to_dict() for record in records]),
            "train": len(self.training),
            "validation": len(self.validation),
        }


def open_training_data(
    config: TrainConfig, recipe: Recipe, device: torch.device, workers: Workers
) -> TrainingData:
    """Open the store or load the model of a run, for the heads that it trains.

    Raises:
        StoreError: the store is damaged, incomplete or holds nothing to train or validate on.
        ModelError: the model or its tokenizer cannot be used.
        UsageError: settings that cannot work.
    """
    if config.source == "traces":
        return _open_store(config, recipe)
    # brings transformers, which stores do not need
    from train.online.training_data import open_online_training_data

    return open_online_training_data(config, recipe, device, workers)


def _open_store(config: TrainConfig, recipe: Recipe) -> StoreTrainingData:
    assert config.traces is not None, "checked by the configuration"
    reader = TraceReader(place(config.traces))
    if config.heads is not None:
        heads = heads_within(parse_heads(config.heads), reader.geometry)
        reader = TraceReader(place(config.traces), heads=slice(heads.start, heads.stop))
    check_store(reader, recipe, allow_incomplete=config.allow_incomplete)
    check_label(reader.path, reader.plan, recipe.label)
    training = _first(usable(reader, "train", recipe), recipe.sequences)
    return StoreTrainingData(
        traces=reader, training=training, validation=usable(reader, "validation", recipe)
    )


def _first(records: list[SequenceRecord], count: int) -> list[SequenceRecord]:
    """The first `count` records, all for 0."""
    if count > len(records):
        raise UsageError(
            f"--sequences {count}: the store has {len(records)} training sequences that are long "
            "enough"
        )
    return records[: count or None]
