"""Training data from a model that runs before the first step (`train.data.training_data`)."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from rich.filesize import decimal
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from kvp.data.collection_plan import data_identity, plan_collection
from kvp.data.encode import encode
from kvp.data.task import Sample, TaskSettings
from kvp.errors import UsageError
from kvp.geometry import Geometry
from kvp.hf import geometry_of, load_config, load_model, load_tokenizer
from kvp.hf.model_access import known_frequencies, known_output_gram, model_identity
from kvp.hf.model_size import default_batch_size
from kvp.hf.trace import Recorded, check_reach, collect_all, sequence_record
from kvp.manifest import recorded_name
from kvp.progress import phase
from kvp.store import SequenceRecord, StorePlan, planned_bytes
from train.calibration.fit import TARGET_LABELS
from train.config import TrainConfig
from train.data.compression_points import (
    draw_point,
    held_out_points,
    points_by_kind,
    sequence_order,
    shortest_prefix,
)
from train.distributed import Workers
from train.head_range import heads_within, parse_heads
from train.labels import EVALUATED
from train.labels.label import label_of
from train.online.model_traces import Attention, ModelTraces
from train.online.settings import SEQUENCES, OnlineSettings
from train.recipe import Recipe

_HELD_OUT_ATTENTION = 6
"""Attentions kept of a validation sequence at most: three labels at two points."""


@dataclass(frozen=True, kw_only=True)
class Prompts:
    """What runs through the model: training prompts, numbered from 0 on, then those of validation.

    A training prompt that is too short to compress, whatever its answer, is left out.
    """

    training: list[Sample]
    validation: Sequence[Sample]
    identity: dict[str, Any]
    notes: tuple[str, ...]
    """Notes on the data for the user, one line each."""

    @classmethod
    def of(cls, config: TrainConfig, recipe: Recipe, tokenizer: PreTrainedTokenizerBase) -> Prompts:
        """Make the prompts of a training; UsageError for data that cannot work."""
        settings = config.online()
        requested = recipe.sequences or SEQUENCES
        request = TaskSettings.of(
            settings, seed=config.seed, needs_reply=settings.answers == "reference"
        )
        jobs = plan_collection(
            request, {"train": requested, "validation": settings.validation_sequences}, tokenizer
        )
        train, validation = jobs.sources
        if len(train) < recipe.sequences:
            raise UsageError(
                f"--sequences {recipe.sequences}: --data {settings.data} has only {len(train)} for "
                "training"
            )
        training = [sample for sample in train if long_enough(sample, tokenizer, recipe)]
        if not training:
            rule = too_short(recipe, settings.length)
            raise UsageError(f"--data {settings.data}: no prompt {rule}")
        return cls(
            training=training,
            validation=validation,
            identity=data_identity(request, jobs.tasks),
            notes=jobs.notes,
        )

    @property
    def held_out(self) -> range:
        """Numbers of the validation prompts."""
        return range(len(self.training), len(self.training) + len(self.validation))

    def __getitem__(self, number: int) -> Sample:
        """The prompt of a number."""
        if number < len(self.training):
            return self.training[number]
        return self.validation[number - len(self.training)]


@dataclass(frozen=True, kw_only=True)
class OnlineTrainingData:
    """`train.data.training_data.TrainingData` whose sequences run through a model at first use."""

    config: TrainConfig
    recipe: Recipe
    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    prompts: Prompts
    traces: ModelTraces
    workers: Workers

    @property
    def identity(self) -> dict[str, Any]:
        """Identity of the traces and their order; JSON."""
        identity: dict[str, Any] = self.traces.manifest["identity"]
        return identity

    @cached_property
    def training(self) -> list[SequenceRecord]:
        """The training sequences."""
        started = time.monotonic()
        records = self._traced(range(len(self.prompts.training)))
        if self.workers.first:
            speed = sum(record.length for record in records) / (time.monotonic() - started)
            several = self.workers.count > 1
            each = f" in each of {self.workers.count} processes" if several else ""
            print(f"{len(records)} sequences through the model at {speed:.0f} tokens/s{each}")
        return records

    @cached_property
    def validation(self) -> list[SequenceRecord]:
        """Validation sequences that are long enough; UsageError where none is."""
        records = self._traced(self.prompts.held_out)
        found = [record for record in records if points_by_kind(record, self.recipe)]
        if not found:
            rule = too_short(self.recipe, self.config.length)
            raise UsageError(f"--validation_sequences {len(records)}: none of them {rule}")
        return found

    def _traced(self, numbers: Iterable[int]) -> list[SequenceRecord]:
        """Run the model over prompts and keep their traces; records in the order of the numbers."""
        settings = self.config.online()
        recorded = Recorded(
            continuation=settings.answers,
            max_new_tokens=settings.max_new_tokens,
            labels=self.traces.plan.labels,
        )
        rows = default_batch_size(
            self.model.config, dtype=settings.dtype, max_tokens=settings.max_tokens
        )
        samples = ((number, self.prompts[number]) for number in numbers)
        records = []
        for trace in collect_all(self.model, self.tokenizer, samples, recorded, rows=rows):
            records.append(self.traces.keep(trace))
        return sorted(records, key=lambda record: record.index)


def attention_of(
    record: SequenceRecord, config: TrainConfig, recipe: Recipe, prompts: Prompts
) -> list[Attention]:
    """Importance of a sequence that training, validation or calibration will ask for."""
    if record.index < len(prompts.training):
        draws = draws_of(record.index, len(prompts.training), recipe, seed=config.seed)
        points = [draw_point(record, recipe, seed=config.seed, draw=draw) for draw in draws]
        labels = [recipe.label]
    else:
        usable = bool(points_by_kind(record, recipe))
        points = held_out_points([record], recipe, limit=2) if usable else []
        labels = [recipe.label, EVALUATED]
        if config.calibration != "none":
            labels.append(TARGET_LABELS[config.calibration])
    computed = [label for label in labels if label_of(label).from_queries is not None]
    return [(label, point.prefix_length, point.stop) for point in points for label in computed]


def draws_of(number: int, sequences: int, recipe: Recipe, *, seed: int) -> list[int]:
    """Draws (contexts counted from the first step on) that one of `sequences` sequences serves.

    What `train.data.compression_points.drawn_points` will draw, computed ahead.
    """
    each, draws = recipe.points_per_sequence, recipe.steps * recipe.contexts
    found: list[int] = []
    for passes in range(-(-draws // (each * sequences))):
        order = sequence_order(sequences, seed=seed, passes=passes).tolist()
        first = (passes * sequences + order.index(number)) * each
        found += range(first, min(first + each, draws))
    return found


def open_online_training_data(
    config: TrainConfig, recipe: Recipe, device: torch.device, workers: Workers
) -> OnlineTrainingData:
    """Load the model and plan the collection; nothing runs yet. Prints the RAM it will take.

    Each of several `workers` loads the model and runs it over all training sequences; the first one
    alone validates.

    Raises:
        ModelError: the model or its tokenizer cannot be used.
        UsageError: data, tasks, lengths or sizes that cannot work.
    """
    settings = config.online()
    if recipe.min_prefix >= settings.length:
        raise UsageError(f"--data {settings.data}: no prompt {too_short(recipe, settings.length)}")
    model_config = load_config(settings.model, revision=settings.revision)
    check_reach(model_config, settings.model, settings.length, settings.max_new_tokens)
    tokenizer = load_tokenizer(settings.model, revision=settings.revision)
    prompts = Prompts.of(config, recipe, tokenizer)
    if workers.first:
        phase(f"loading {settings.model}")
    model, tokenizer = load_model(
        settings.model,
        device=str(device),
        dtype=settings.dtype,
        revision=settings.revision,
        quantization=settings.quantization,
    )
    sequences = len(prompts.training), len(prompts.validation)
    plan = plan_of(geometry_of(model_config), settings, recipe, *sequences)
    heads = None
    if config.heads is not None:
        heads = heads_within(parse_heads(config.heads), plan.geometry)
    most_bytes = kept_bytes(plan, recipe, *sequences)
    if heads is not None:
        most_bytes = most_bytes * len(heads) // plan.geometry.total_kv_heads
    _check_memory(config, most_bytes, *sequences)
    if workers.first and not config.dry_run:
        _announce(config, plan, prompts, most_bytes, workers.count)
    manifest = {
        "model": {"id": recorded_name(settings.model), "revision": settings.revision},
        "rope_frequencies": known_frequencies(model, settings.max_tokens),
        "identity": {
            "model": model_identity(settings.model, settings.revision, model, tokenizer),
            "data": prompts.identity,
            "continuation": settings.answers,
            "max_new_tokens": settings.max_new_tokens,
            "dtype": settings.dtype,
            "train": sequences[0],
            "validation": sequences[1],
        },
    }
    traces = ModelTraces(
        plan=plan,
        manifest=manifest,
        gram=known_output_gram(model),
        attention=lambda record: attention_of(record, config, recipe, prompts),
        device=device,
        heads=heads,
    )
    return OnlineTrainingData(
        config=config,
        recipe=recipe,
        model=model,
        tokenizer=tokenizer,
        prompts=prompts,
        traces=traces,
        workers=workers,
    )


def plan_of(
    geometry: Geometry, settings: OnlineSettings, recipe: Recipe, train: int, validation: int
) -> StorePlan:
    """What is kept of every sequence: importance at the points of its draws, or its queries.

    Whichever takes less, where rankers do not read queries.
    """
    stored = label_of(recipe.label).stored
    plan = StorePlan(
        geometry=geometry,
        dtype=settings.dtype,
        max_tokens=settings.max_tokens,
        sequences=train + validation,
        store="kv",
        labels=() if stored is None else (stored,),
    )
    with_queries = replace(plan, store="qkv")
    if recipe.needs_queries or kept_bytes(plan, recipe, train, 0) > kept_bytes(
        with_queries, recipe, train, 0
    ):
        return with_queries
    return plan


def kept_bytes(plan: StorePlan, recipe: Recipe, train: int, validation: int) -> int:
    """Maximum bytes of so many sequences in RAM."""
    total = planned_bytes(
        plan.geometry,
        dtype=plan.dtype,
        tokens=(train + validation) * plan.max_tokens,
        store=plan.store,
        labels=len(plan.labels),
    )
    if plan.store_queries:
        return total
    each = recipe.points_per_sequence
    points = -(-recipe.steps * recipe.contexts // (each * train)) * each
    if recipe.uniform_points:
        points = min(points, recipe.uniform_points + len(("prompt", "context")))
    importances = train * points + validation * _HELD_OUT_ATTENTION
    return total + importances * 4 * plan.max_tokens * plan.geometry.total_kv_heads


def long_enough(sample: Sample, tokenizer: PreTrainedTokenizerBase, recipe: Recipe) -> bool:
    """Whether a prompt is long enough to compress whatever its answer turns out to be."""
    record = sequence_record(sample, encode(sample, tokenizer), reply=(), index=0)
    return bool(points_by_kind(record, recipe))


def too_short(recipe: Recipe, length: int) -> str:
    """End of a message about prompts of at most `length` tokens that are too short to compress."""
    limit = f"--min_prefix {shortest_prefix(recipe)}"
    return f"is longer than {limit}; lower it or raise --length {length}"


def _check_memory(config: TrainConfig, most_bytes: int, train: int, validation: int) -> None:
    """Raise UsageError where what is kept does not fit."""
    bound = int(config.memory_gb * 1e9) * 3 // 4
    if most_bytes > bound:
        raise UsageError(
            f"--sequences {train} and --validation_sequences {validation} may take "
            f"{decimal(most_bytes)}, three quarters of --memory_gb {config.memory_gb:g} are "
            f"{decimal(bound)}; use fewer, or --memory_gb {memory_gb_for(most_bytes):g}"
        )


def memory_gb_for(kept: int) -> float:
    """The `--memory_gb` that so many bytes of traces ask for."""
    return math.ceil(kept / 0.75e8) / 10


def _announce(
    config: TrainConfig, plan: StorePlan, prompts: Prompts, most_bytes: int, processes: int
) -> None:
    """Print what will run and the RAM that it takes."""
    for note in prompts.notes:
        print(f"note: {note}")
    each = "" if processes == 1 else f" in each of {processes} processes"
    kept = "queries" if plan.store_queries else "their attention"
    print(
        f"{len(prompts.training)} sequences and {len(prompts.validation)} for validation, of at "
        f"most {plan.max_tokens} tokens, will run through {config.model}; they take at most "
        f"{decimal(most_bytes)} of RAM{each} (keys, values and {kept}, {plan.dtype})"
    )
