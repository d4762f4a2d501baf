"""What a collection is asked for, and what every sequence of it is collected with."""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from rich.filesize import decimal
from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from kvp.artifacts.addresses import ObjectPath, Place, place
from kvp.artifacts.claim import check_folder
from kvp.costs import COMPRESSED
from kvp.data.sources import CollectionPlan, data_identity, plan_collection
from kvp.data.task import TaskSettings
from kvp.errors import StoreError
from kvp.hf import geometry_of
from kvp.hf.model_access import tokenizer_digest
from kvp.hf.trace import Recorded, collect_all, default_batch_size
from kvp.manifest import recorded_name
from kvp.store import Trace, planned_bytes
from kvp.store.metadata import STORE, committed, has_no_sequence
from trace_collect.config import CollectConfig


def prompts_of(config: CollectConfig) -> TaskSettings:
    """Settings of the prompts."""
    return TaskSettings.of(config, needs_reply=config.answers == "reference")


def planned(config: CollectConfig, tokenizer: PreTrainedTokenizerBase) -> CollectionPlan:
    """The prompts by index; UsageError for data that does not exist or fit."""
    return plan_collection(prompts_of(config), config.counts, tokenizer)


def identity_of(
    config: CollectConfig,
    jobs: CollectionPlan,
    tokenizer: PreTrainedTokenizerBase,
    weights: str | None,
) -> dict[str, Any]:
    """What decides the content of a store: a resumed run must repeat all of it.

    `weights` is their digest (`kvp.hf.model_access.weights_digest`). The device is left out: it
    changes rounding, which is not what a trace means.
    """
    data = data_identity(prompts_of(config), jobs.tasks)
    return {
        **({} if config.chat_template else {"chat_template": False}),
        "model": {
            "id": recorded_name(config.model),
            "revision": config.revision,
            "weights": weights,
            "tokenizer": tokenizer_digest(tokenizer),
        },
        "data": {**data, "sequences": config.counts},
        "continuation": config.answers,
        "max_new_tokens": config.max_new_tokens,
        "seed": config.seed,
    }


def check_out(
    config: CollectConfig, jobs: CollectionPlan, tokenizer: PreTrainedTokenizerBase
) -> int:
    """Sequences that `--out` already holds; raises StoreError where it cannot take the others.

    Needs no weights: whether they are the same is checked when they are loaded.
    """
    out = place(config.out)
    marker = STORE.read_marker(out) if out.is_dir() else None
    model = marker["identity"].get("model") if marker else None
    weights = model.get("weights") if isinstance(model, dict) else None
    identity = identity_of(config, jobs, tokenizer, weights)
    if refusal := check_folder(out, STORE, identity, replaceable=has_no_sequence):
        raise StoreError(refusal)
    return len(committed(out)) if marker else 0


@dataclass(frozen=True)
class Collection:
    """What every sequence is collected with."""

    config: CollectConfig
    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    jobs: CollectionPlan

    def traces(self, indices: Iterable[int]) -> Iterator[Trace]:
        """Run the model over the prompts of many indices, `batch_size` of them at a time."""
        recorded = Recorded(
            continuation=self.config.answers,
            max_new_tokens=self.config.max_new_tokens,
            labels=self.config.label_list,
        )
        samples = ((index, self.jobs[index]) for index in indices)
        return collect_all(self.model, self.tokenizer, samples, recorded, rows=self.batch_size)

    @property
    def batch_size(self) -> int:
        """Prompts whose answers are decoded together."""
        config = self.config
        return config.batch_size or default_batch_size(
            self.model.config, dtype=config.dtype, max_tokens=config.max_tokens
        )


def announce(config: CollectConfig, model: PreTrainedConfig, sequences: int) -> int:
    """Print what a store of so many sequences takes; its bytes on disk, about."""
    raw = planned_bytes(
        geometry_of(model),
        dtype=config.dtype,
        tokens=sequences * config.max_tokens,
        labels=len(config.label_list),
    )
    on_disk = round(raw * COMPRESSED[config.dtype])
    print(
        f"{sequences} sequences, at most {sequences * config.max_tokens} tokens; "
        f"{geometry_of(model)}, {config.dtype}"
    )
    print(f"at most {decimal(raw)}, about {decimal(on_disk)} on disk after lossless compression")
    return on_disk


def check_disk(path: Place, needed: int) -> None:
    """Raise StoreError when the disk that `path` will be on has fewer than `needed` bytes left.

    An object store has no such limit.
    """
    if isinstance(path, ObjectPath):
        return
    folder = path.absolute()
    while not folder.exists():
        folder = folder.parent
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise StoreError(
            f"--out {path}: about {decimal(needed)} to write, {decimal(free)} free on that disk"
        )
