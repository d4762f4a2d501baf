"""Checks of a trace store and of a device before training and calibration."""

from __future__ import annotations

import torch

from kvp.artifacts.addresses import Place
from kvp.errors import StoreError, UsageError
from kvp.ranking import UNPROTECTED, Protection
from kvp.store import SequenceRecord, StorePlan, TraceReader
from train.data.compression_points import points_by_kind, shortest_prefix
from train.labels.label import label_of
from train.recipe import Recipe


def check_store(reader: TraceReader, recipe: Recipe, *, allow_incomplete: bool) -> None:
    """Raise StoreError unless a store is complete and holds what rankers and their labels need."""
    planned, committed = reader.plan.sequences, len(reader.records())
    if committed < planned and not allow_incomplete:
        raise StoreError(
            f"--traces {reader.path} lacks {planned - committed} of {planned} sequences; "
            "let kvp-collect finish, or pass --allow_incomplete"
        )
    if reader.plan.store == "kv":
        raise StoreError(
            f"--traces {reader.path} was collected without queries; future attention needs them: "
            "kvp-collect --store qkv"
        )
    if "model" not in reader.manifest:
        raise StoreError(f"--traces {reader.path}: its manifest does not name the model")


def check_label(path: Place, plan: StorePlan, label: str) -> None:
    """Raise StoreError unless a store holds a label wherever training may compress."""
    if missing := label_of(label).missing(plan):
        raise StoreError(f"--label {label}: --traces {path} {missing}")


def usable(reader: TraceReader, split: str, recipe: Recipe) -> list[SequenceRecord]:
    """Records of a split that are long enough to compress; StoreError if there are none."""
    records = reader.records(split)
    long_enough = [record for record in records if points_by_kind(record, recipe)]
    if not long_enough:
        limit = f"--min_prefix {shortest_prefix(recipe)}"
        reason = f"none of its {len(records)} sequences is longer than {limit}"
        raise StoreError(
            f"--traces {reader.path} has no {split} sequences long enough to compress: "
            + (reason if records else f"collect some with the split {split}")
        )
    return long_enough


def protection_of(recipe: Recipe) -> Protection:
    """Tokens that take no part in ranking, reward and calibration."""
    return Protection() if recipe.exclude_protected else UNPROTECTED


def device_of(name: str) -> torch.device:
    """The device of a flag; UsageError where there is none of that name."""
    try:
        device = torch.device(name)
    except RuntimeError:
        raise UsageError(f"--device {name} is not a device; use cpu, cuda or cuda:INDEX") from None
    if device.type not in ("cpu", "cuda"):
        raise UsageError(f"--device {name} is not supported; use cpu, cuda or cuda:INDEX")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise UsageError(f"--device {name} does not exist here; use cpu")
    return device
