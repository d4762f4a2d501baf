"""Training data: a trace store and the sequences of it that a run uses."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvp.artifacts.addresses import place
from kvp.artifacts.files import digest_json
from kvp.errors import StoreError, UsageError
from kvp.store import SequenceRecord, TraceReader
from kvp.store.metadata import store_digest
from train.config import TrainConfig
from train.data.compression_points import points_by_kind
from train.data.labels import load_label
from train.recipe import Recipe


@dataclass(frozen=True, kw_only=True)
class TrainingData:
    """Traces of the heads that are trained, with the sequences to train and to validate on."""

    traces: TraceReader
    identity: dict[str, Any]
    """Identity of the training data, independent of where it is stored; JSON."""
    training: list[SequenceRecord]
    validation: list[SequenceRecord]


def open_store(config: TrainConfig, recipe: Recipe) -> TrainingData:
    """Open the store of a run, for the heads it trains; StoreError where it cannot be used."""
    path = place(config.traces)
    reader = TraceReader(path)
    heads = config.heads_of(reader.geometry)
    if config.heads is not None:
        reader = TraceReader(path, heads=slice(heads.start, heads.stop))
    if not reader.manifest.get("model", {}).get("id"):
        raise StoreError(f"--traces {reader.path} does not say which model it is of")
    planned, committed = reader.plan.sequences, len(reader.records())
    if committed < planned:
        raise StoreError(
            f"--traces {reader.path} lacks {planned - committed} of {planned} sequences; "
            "let kvp collect finish"
        )
    if (stored := load_label(recipe.label).stored) not in (None, *reader.plan.labels):
        raise StoreError(
            f"--label {recipe.label}: --traces {path} holds no label {stored}; collect it with "
            f"kvp collect --labels {stored}"
        )
    training = usable_records(reader, "train", recipe)
    validation = usable_records(reader, "validation", recipe)
    if recipe.sequences > len(training):
        raise UsageError(
            f"--sequences {recipe.sequences}: the store has {len(training)} training "
            "sequences that are long enough"
        )
    training = training[: recipe.sequences or None]
    identity = {
        "geometry": reader.geometry.to_dict(),
        "store": store_digest(reader.manifest, reader.plan),
        "sequences": digest_json([record.to_dict() for record in (*training, *validation)]),
        "train": len(training),
        "validation": len(validation),
    }
    return TrainingData(traces=reader, identity=identity, training=training, validation=validation)


def usable_records(reader: TraceReader, split: str, recipe: Recipe) -> list[SequenceRecord]:
    """Records of a split that are long enough to compress; StoreError if there are none."""
    records = reader.records(split)
    long_enough = [record for record in records if points_by_kind(record, recipe)]
    if not long_enough:
        limit = f"--min_prefix {recipe.min_prefix}"
        reason = f"none of its {len(records)} sequences is longer than {limit}"
        raise StoreError(
            f"--traces {reader.path} has no {split} sequences long enough to compress: "
            + (reason if records else f"collect some with the split {split}")
        )
    return long_enough


def recorded_text(manifest: Mapping[str, Any]) -> dict[str, Any]:
    """What traces were taken of: `data` (names, length, sequences), `answers` and `command`."""
    identity = manifest.get("identity", {})
    text = {"data": identity.get("data"), "answers": identity.get("continuation")}
    text["command"] = manifest.get("command")
    return {name: value for name, value in text.items() if value is not None}


def recorded_model(manifest: Mapping[str, Any]) -> dict[str, str | None]:
    """Name, revision and digests of the model that traces come from, as far as recorded."""
    return {**manifest["model"], **manifest.get("identity", {}).get("model", {})}
