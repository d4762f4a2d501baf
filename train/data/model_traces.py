"""Training data from a model that runs before the first step: its traces stay in RAM.

In place of a sequence's queries lies the importance at its compression points, where these are few.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from typing import Any

import torch
from rich.filesize import decimal
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from kvp.artifacts.manifest import recorded_name
from kvp.data.encode import encode
from kvp.data.sources import data_identity, plan_collection
from kvp.data.task import Sample, TaskSettings
from kvp.errors import UsageError
from kvp.geometry import Geometry
from kvp.hf import geometry_of, load_config
from kvp.hf.loading import model_of, tokenizer_of
from kvp.hf.model_access import known_frequencies, known_output_gram, model_identity
from kvp.hf.trace import Recorded, check_reach, collect_all, default_batch_size, sequence_record
from kvp.program.progress import Progress, phase
from kvp.store import SequenceRecord, StorePlan, planned_bytes
from train.config import TrainConfig
from train.data.compression_points import every_point, held_out_points, points_by_kind
from train.data.kept_traces import Attention, ModelTraces
from train.data.labels import EVALUATED, calibration_label, label_of
from train.data.training_data import TrainingData
from train.recipe import Recipe

SEQUENCES = 100
"""Training sequences where `--sequences` names no number: learning curves are flat from twenty on
(docs/results/training.md)."""
_HELD_OUT_ATTENTION = 6
"""Attentions kept of a validation sequence at most: three labels at two points."""


@dataclass(frozen=True, kw_only=True)
class Prompts:
    """What runs through the model.

    A training prompt that is too short to compress, whatever its answer, is left out.
    """

    samples: list[Sample]
    """By number: first those of training, then those of validation."""
    training: int
    """How many are of training."""
    identity: dict[str, Any]
    notes: tuple[str, ...]
    """Notes on the data for the user, one line each."""

    @classmethod
    def of(cls, config: TrainConfig, recipe: Recipe, tokenizer: PreTrainedTokenizerBase) -> Prompts:
        """Make the prompts of a training; UsageError for data that cannot work."""
        counts = {"train": recipe.sequences or SEQUENCES, "validation": config.validation_sequences}
        request = TaskSettings.of(config, needs_reply=config.answers == "reference")
        jobs = plan_collection(request, counts, tokenizer)
        train, validation = jobs.sources
        if len(train) < recipe.sequences:
            raise UsageError(
                f"--sequences {recipe.sequences}: --data {config.data} has only {len(train)} for "
                "training"
            )
        # Without an answer, so that a prompt is long enough whatever its answer turns out to be.
        records = (sequence_record(sample, encode(sample, tokenizer), reply=(), index=0)
                   for sample in train)  # fmt: skip
        pairs = zip(train, records, strict=True)
        training = [sample for sample, record in pairs if points_by_kind(record, recipe)]
        if not training:
            raise UsageError(f"--data {config.data}: no prompt {too_short(recipe, config.length)}")
        return cls(
            samples=[*training, *validation],
            training=len(training),
            identity=data_identity(request, jobs.tasks),
            notes=jobs.notes,
        )

    @property
    def counts(self) -> tuple[int, int]:
        """Prompts of training and of validation."""
        return self.training, len(self.samples) - self.training


def open_model(config: TrainConfig, recipe: Recipe, device: torch.device) -> TrainingData:
    """Load the model and plan what runs through it; nothing runs yet. Prints the RAM it will take.

    Raises ModelError or UsageError where model, data, tasks, lengths or sizes cannot work.
    """
    if recipe.min_prefix >= config.length:
        raise UsageError(f"--data {config.data}: no prompt {too_short(recipe, config.length)}")
    model_config = load_config(config.model, revision=config.revision)
    check_reach(model_config, config.model, config.length, config.max_new_tokens)
    tokenizer = tokenizer_of(config)
    prompts = Prompts.of(config, recipe, tokenizer)
    phase(f"loading {config.model}")
    model, tokenizer = model_of(config, str(device))
    plan, most_bytes = plan_memory(geometry_of(model_config), config, recipe, *prompts.counts)
    _announce(config, prompts, plan, most_bytes)
    manifest = _manifest_of(config, prompts, model, tokenizer)
    traces = ModelTraces(
        plan=plan,
        manifest=manifest,
        gram=known_output_gram(model),
        attention=lambda record: attention_of(record, recipe, prompts.training),
        device=device,
        heads=config.heads_of(plan.geometry),
    )
    recorded = Recorded(
        continuation=config.answers, max_new_tokens=config.max_new_tokens, labels=plan.labels
    )
    rows = default_batch_size(model_config, dtype=config.dtype, max_tokens=config.max_tokens)

    def trace_split(split: str) -> list[SequenceRecord]:
        """Run the model over the prompts of a split and keep their traces."""
        started = time.monotonic()
        numbered, first = list(enumerate(prompts.samples)), prompts.training
        samples = numbered[:first] if split == "train" else numbered[first:]
        made = collect_all(model, tokenizer, samples, recorded, rows=rows)
        with Progress("collecting", len(samples)) as progress:
            records = [traces.keep(trace) for trace in progress.over(made)]
        if split == "train":
            speed = sum(record.length for record in records) / (time.monotonic() - started)
            print(f"{len(records)} sequences through the model at {speed:.0f} tokens/s")
            return records
        usable = [record for record in records if points_by_kind(record, recipe)]
        if not usable:
            rule = too_short(recipe, config.length)
            raise UsageError(f"--validation_sequences {len(records)}: none of them {rule}")
        return usable

    return TrainingData(traces=traces, identity=manifest["identity"], sequences_of=trace_split)


def _announce(config: TrainConfig, prompts: Prompts, plan: StorePlan, most_bytes: int) -> None:
    """Print what will run and the RAM it takes; UsageError where that is too much."""
    train, validation = prompts.counts
    bound = int(config.memory_gb * 1e9) * 3 // 4
    if most_bytes > bound:
        raise UsageError(
            f"--sequences {train} and --validation_sequences {validation} may take "
            f"{decimal(most_bytes)}, three quarters of --memory_gb {config.memory_gb:g} are "
            f"{decimal(bound)}; use fewer, or --memory_gb {memory_gb_for(most_bytes):g}"
        )
    for note in prompts.notes:
        print(f"note: {note}")
    kept = "queries" if plan.store_queries else "their attention"
    print(
        f"{train} sequences and {validation} for validation, of at most {plan.max_tokens} "
        f"tokens, will run through {config.model}; they take at most {decimal(most_bytes)} of "
        f"RAM (keys, values and {kept}, {plan.dtype})"
    )


def _manifest_of(
    config: TrainConfig,
    prompts: Prompts,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
) -> dict[str, Any]:
    train, validation = prompts.counts
    return {
        "model": {"id": recorded_name(config.model), "revision": config.revision},
        "rope_frequencies": known_frequencies(model, config.max_tokens),
        "identity": {
            "model": model_identity(config.model, config.revision, model, tokenizer),
            "data": prompts.identity,
            "continuation": config.answers,
            "max_new_tokens": config.max_new_tokens,
            "dtype": config.dtype,
            "train": train,
            "validation": validation,
        },
    }


def attention_of(record: SequenceRecord, recipe: Recipe, training: int) -> list[Attention]:
    """Importance of a sequence that training, validation or calibration may ask for.

    The first `training` sequences are trained on.
    """
    if record.index < training:
        points, labels = every_point(record, recipe), [recipe.label]
    else:
        possible = bool(points_by_kind(record, recipe))
        points = held_out_points([record], recipe, limit=2) if possible else []
        labels = [recipe.label, EVALUATED, calibration_label(recipe.label)]
    computed = [label for label in labels if label_of(label).from_queries is not None]
    return [(label, point.prefix_length, point.stop) for point in points for label in computed]


def plan_memory(
    geometry: Geometry, config: TrainConfig, recipe: Recipe, train: int, validation: int
) -> tuple[StorePlan, int]:
    """What is kept of every sequence of the trained heads, and its maximum bytes.

    Importance at every point; queries where rankers read them, or any position may be a point.
    """
    stored = label_of(recipe.label).stored
    queries = recipe.needs_queries or not recipe.uniform_points
    plan = StorePlan(
        geometry=geometry,
        dtype=config.dtype,
        max_tokens=config.max_tokens,
        sequences=train + validation,
        store="qkv" if queries else "kv",
        labels=() if stored is None else (stored,),
    )
    whole = planned_bytes(
        geometry,
        dtype=plan.dtype,
        tokens=plan.sequences * plan.max_tokens,
        store=plan.store,
        labels=len(plan.labels),
    )
    if not queries:
        importances = train * (recipe.uniform_points + 2) + validation * _HELD_OUT_ATTENTION
        whole += importances * 4 * plan.max_tokens * geometry.total_kv_heads
    return plan, whole * len(config.heads_of(geometry)) // geometry.total_kv_heads


def too_short(recipe: Recipe, length: int) -> str:
    """End of a message about prompts of at most `length` tokens that are too short to compress."""
    return f"is longer than --min_prefix {recipe.min_prefix}; lower it or raise --length {length}"


def memory_gb_for(kept: int) -> float:
    """The `--memory_gb` that so many bytes of traces ask for."""
    return math.ceil(kept / 0.75e8) / 10


def print_memory(config: TrainConfig, recipe: Recipe) -> None:
    """Print the RAM that the traces take, from the model's configuration alone.

    Raises as the training itself would, as far as can be known.
    """
    model_config = load_config(config.model, revision=config.revision)
    check_reach(model_config, config.model, config.length, config.max_new_tokens)
    geometry = geometry_of(model_config)
    training, validation = recipe.sequences or SEQUENCES, config.validation_sequences
    _, kept = plan_memory(geometry, config, recipe, training, validation)
    print(
        f"{geometry}, {config.dtype}; {training} training and {validation} validation sequences of "
        f"at most {config.length} + {config.max_new_tokens} tokens take {decimal(kept)} of RAM "
        f"(--memory_gb {max(memory_gb_for(kept), config.memory_gb):g}); {recipe.steps:,} steps of "
        f"{recipe.contexts} contexts\ndry run: nothing was written"
    )
