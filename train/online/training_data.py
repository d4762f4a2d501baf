"""Training data from a model that runs during training (`train.data.training_data`)."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, cached_property, partial
from typing import Any

import torch
from rich.filesize import decimal
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from kvp.errors import UsageError
from kvp.geometry import Geometry
from kvp.hf import geometry_of, load_config, load_model, load_tokenizer
from kvp.hf.identity import model_identity
from kvp.hf.model_access import known_frequencies
from kvp.hf.output_projection import known_output_gram
from kvp.hf.trace import check_reach
from kvp.portable import recorded_name
from kvp.progress import phase
from kvp.store import SequenceRecord, StorePlan, planned_bytes
from train.config import TrainConfig
from train.data.compression_points import points_by_kind
from train.distributed import Workers
from train.head_range import heads_within, parse_heads
from train.online.model_runner import HELD_OUT_ATTENTION, Runner, Samples, stored_labels, too_short
from train.online.schedule import Schedule
from train.online.settings import OnlineSettings
from train.online.trace_buffer import ModelTraces, RecordWindow, Tracing
from train.recipe import Recipe


@dataclass(frozen=True, kw_only=True)
class RollingRecords:
    """Sequences to train on, pass by pass, as `train.data.compression_points.Rolling`."""

    traces: ModelTraces
    schedule: Schedule
    order: Callable[[int], list[int]]
    """The sequences of a pass in the order in which training takes them."""

    def __len__(self) -> int:
        """Sequences of a pass."""
        return self.schedule.size

    def during(self, passes: int) -> RecordWindow:
        """The sequences of a pass, counted from 0, traced when they are read.

        What is missing runs through the model together with what follows it in that order.
        """
        start = self.schedule.start(passes)
        self.traces.expect(self.order(passes))
        return RecordWindow(self.traces, range(start, start + len(self)))


@dataclass(frozen=True, kw_only=True)
class OnlineTrainingData:
    """`train.data.training_data.TrainingData` where the model runs when a trace is read."""

    traces: ModelTraces
    training: RollingRecords
    identity: dict[str, Any]
    held_out: range
    """Numbers of the validation sequences."""
    recipe: Recipe
    length: int
    """Maximum tokens of a prompt."""
    workers: Workers

    @cached_property
    def first(self) -> list[SequenceRecord]:
        """The training sequences of the first pass."""
        started, before = time.monotonic(), self.traces.tokens
        window = self.training.during(0)
        self.traces.trace_all(window.numbers)
        records = list(window)
        tokens, seconds = self.traces.tokens - before, time.monotonic() - started
        if tokens and self.workers.first:
            ahead = self.training.schedule.needed(self.recipe) - len(records)
            rest = ahead * seconds / len(records)
            each = "" if self.workers.count == 1 else f" in each of {self.workers.count} processes"
            later = f"; the {ahead} that follow will take about {rest:.0f} s between steps"
            print(
                f"{len(records)} sequences through the model at {tokens / seconds:.0f} tokens/s"
                f"{each}{later if ahead else ''}"
            )
        return records

    @cached_property
    def validation(self) -> list[SequenceRecord]:
        """Validation sequences that are long enough; UsageError where none is."""
        self.traces.trace_all(self.held_out)
        records = list(RecordWindow(self.traces, self.held_out))
        long_enough = [record for record in records if points_by_kind(record, self.recipe)]
        if not long_enough:
            rule = too_short(self.recipe, self.length)
            raise UsageError(f"--validation_sequences {len(records)}: none of them {rule}")
        return long_enough


def open_online_training_data(
    config: TrainConfig, recipe: Recipe, device: torch.device, workers: Workers
) -> OnlineTrainingData:
    """Load the model and plan the collection; nothing runs yet. Prints the RAM it will take.

    Each of several `workers` loads the model and runs it over what its own contexts need, besides
    the first pass, which feature statistics are taken from.

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
    samples = Samples.open(settings, recipe, tokenizer, config.seed)
    if workers.first:
        phase(f"loading {settings.model}")
    model, tokenizer = load_model(
        settings.model,
        device=str(device),
        dtype=settings.dtype,
        revision=settings.revision,
        quantization=settings.quantization,
    )
    schedule = samples.schedule
    plan = _plan(geometry_of(model_config), settings, samples, recipe)
    heads = range(plan.geometry.total_kv_heads)
    if config.heads is not None:
        heads = heads_within(parse_heads(config.heads), plan.geometry)
    most_bytes = _buffer_bytes(config, plan, samples, len(heads))
    if workers.first:
        _announce(config, plan, samples, most_bytes, workers.count)
    held_out = range(samples.needed, samples.needed + len(samples.validation))
    runner = Runner(settings, recipe, config, model, tokenizer, samples)
    traces = ModelTraces(
        _tracing(runner, _identity(settings, samples, model, tokenizer)),
        plan,
        capacity=schedule.size,
        pinned=held_out,
        device=device,
        heads=None if config.heads is None else slice(heads.start, heads.stop),
    )
    return OnlineTrainingData(
        traces=traces,
        training=_rolling(traces, schedule, recipe, config.seed, workers),
        identity=traces.manifest["identity"],
        held_out=held_out,
        recipe=recipe,
        length=settings.length,
        workers=workers,
    )


def _rolling(
    traces: ModelTraces, schedule: Schedule, recipe: Recipe, seed: int, workers: Workers
) -> RollingRecords:
    slots = {*workers.share(range(recipe.contexts))}
    return RollingRecords(
        traces=traces,
        schedule=schedule,
        order=cache(partial(schedule.order, recipe=recipe, slots=slots, seed=seed)),
    )


def _tracing(runner: Runner, identity: dict[str, Any]) -> Tracing:
    settings, model = runner.settings, runner.model
    return Tracing(
        traces=runner.traces,
        together=runner.batch_size,
        attention=runner.attention,
        manifest={
            "model": {"id": recorded_name(settings.model), "revision": settings.revision},
            "rope_frequencies": known_frequencies(model, settings.max_tokens),
            "identity": identity,
        },
        output_gram=known_output_gram(model),
    )


def _identity(
    settings: OnlineSettings,
    samples: Samples,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
) -> dict[str, Any]:
    """Identity of the traces and their order, under the names that runs have always recorded."""
    return {
        "model": model_identity(settings.model, settings.revision, model, tokenizer),
        "data": samples.identity,
        "continuation": settings.answers,
        "max_new_tokens": settings.max_new_tokens,
        "dtype": settings.dtype,
        "buffer": samples.schedule.buffer,
        "visits": samples.schedule.epochs_per_sequence,
        "validation": len(samples.validation),
    }


def _plan(
    geometry: Geometry, settings: OnlineSettings, samples: Samples, recipe: Recipe
) -> StorePlan:
    """Plan of the buffer: importance at the points drawn ahead, or queries if they are smaller."""
    schedule = samples.schedule
    plan = StorePlan(
        geometry=geometry,
        dtype=settings.dtype,
        max_tokens=settings.max_tokens,
        sequences=schedule.size + len(samples.validation),
        store="importance",
        grid=schedule.points(recipe),
        grid_dtype="float32",
        labels=stored_labels(recipe),
    )
    with_queries = replace(plan, store="qkv", grid=0)
    if recipe.needs_queries:
        return with_queries
    return min(plan, with_queries, key=lambda one: _bytes_per_sequence(one, one.grid))


def _bytes_per_sequence(plan: StorePlan, points: int) -> int:
    """Maximum bytes of a sequence whose attention is kept at `points` compression points."""
    bare = planned_bytes(
        plan.geometry,
        dtype=plan.dtype,
        tokens=plan.max_tokens,
        store="qkv" if plan.store_queries else "kv",
        labels=len(plan.labels),
    )
    return bare + 4 * points * plan.max_tokens * plan.geometry.total_kv_heads


def _buffer_bytes(config: TrainConfig, plan: StorePlan, samples: Samples, heads: int) -> int:
    """Maximum bytes of the buffer; UsageError where they do not fit."""
    size, held_out = samples.schedule.size, len(samples.validation)
    validation_points = 0 if plan.store_queries else HELD_OUT_ATTENTION
    total = plan.geometry.total_kv_heads
    each = _bytes_per_sequence(plan, plan.grid) * heads // total
    fixed = held_out * _bytes_per_sequence(plan, validation_points) * heads // total
    maximum, bound = size * each + fixed, int(config.memory_gb * 1e9) * 3 // 4
    if maximum > bound:
        capacity = (bound - fixed) // each
        smaller = f"use --buffer {capacity} or " if capacity > 0 else "use "
        raise UsageError(
            f"--buffer {size} and --validation_sequences {held_out} may take "
            f"{decimal(maximum)}, three quarters of --memory_gb {config.memory_gb:g} are "
            f"{decimal(bound)}; {smaller}"
            f"--memory_gb {math.ceil(maximum / 0.75e8) / 10:g}"
        )
    return maximum


def _announce(
    config: TrainConfig, plan: StorePlan, samples: Samples, most_bytes: int, processes: int
) -> None:
    """Print the size of the buffer and what will run."""
    size, held_out = samples.schedule.size, len(samples.validation)
    place = "RAM" if processes == 1 else f"RAM in each of {processes} processes"
    kept = "queries" if plan.store_queries else "their attention"
    for note in samples.notes:
        print(f"note: {note}")
    print(
        f"buffer: {size} sequences and {held_out} for validation, at most {decimal(most_bytes)} of "
        f"{place} (keys, values and {kept}, {plan.dtype}); {samples.needed + held_out} sequences "
        f"of at most {plan.max_tokens} tokens will run through {config.online().model}, the first "
        f"{size} before the first step, for the statistics that features are standardised with"
    )
