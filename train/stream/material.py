"""Everything a run trains on when it comes from a running model (`train.material`)."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from kvp.data.encode import encode
from kvp.data.plan import DataRequest, plan_jobs
from kvp.data.sample import Sample
from kvp.data.sources import Source
from kvp.errors import ModelError, UsageError
from kvp.geometry import Geometry
from kvp.hf import geometry_of, load_config, load_model
from kvp.hf.identity import model_identity
from kvp.hf.output import output_gram
from kvp.hf.trace import check_reach, collect
from kvp.store import SequenceRecord, StorePlan, Trace, planned_bytes
from train.calibration import TARGETS
from train.config import TrainConfig
from train.cuts import cuts_by_kind, draw_cut, held_out_cuts
from train.presets import FROM_TRACE, Recipe
from train.stream.schedule import Schedule
from train.stream.settings import StreamSettings
from train.stream.source import Attention, ModelTraces, Tracing, Window


@dataclass(frozen=True, kw_only=True)
class RollingRecords:
    """Sequences to train on, pass by pass, as `train.cuts.Rolling`."""

    traces: ModelTraces
    schedule: Schedule

    def __len__(self) -> int:
        """Sequences that a pass visits."""
        return self.schedule.size

    def during(self, passes: int) -> Window:
        """The sequences of a pass, counted from 0; each is traced when it is looked at."""
        start = self.schedule.start(passes)
        return Window(self.traces, range(start, start + len(self)))


@dataclass(frozen=True, kw_only=True)
class StreamMaterial:
    """What `train.material.Material` asks for; the model runs when something is looked at."""

    traces: ModelTraces
    training: RollingRecords
    identity: dict[str, Any]
    held_out: range
    """Numbers of the validation sequences."""
    recipe: Recipe

    @cached_property
    def first(self) -> list[SequenceRecord]:
        """The training sequences of the first pass."""
        started, before = time.monotonic(), self.traces.tokens
        records = list(self.training.during(0))
        tokens, seconds = self.traces.tokens - before, time.monotonic() - started
        if tokens:
            ahead = self.training.schedule.needed(self.recipe) - len(records)
            rest = ahead * seconds / len(records)
            print(
                f"{len(records)} sequences through the model at {tokens / seconds:.0f} tokens/s; "
                f"the {ahead} that follow will take about {rest:.0f} s between steps"
            )
        return records

    @cached_property
    def validation(self) -> list[SequenceRecord]:
        """Validation sequences that can be cut; UsageError where none can."""
        records = list(Window(self.traces, self.held_out))
        found = [record for record in records if cuts_by_kind(record, self.recipe)]
        if not found:
            raise UsageError(
                f"--validation {len(records)}: none of them is longer than --cut_min "
                f"{self.recipe.cut_min}"
            )
        return found


def open_stream(
    config: TrainConfig, recipe: Recipe, device: torch.device, heads: range | None = None
) -> StreamMaterial:
    """Load the model and plan what will run through it; nothing runs yet.

    With `heads`, agents of the model, only their traces are held. Says how much RAM will be taken.

    Raises:
        ModelError: the model or its tokenizer cannot be used.
        UsageError: data, tasks, lengths or sizes that cannot work.
    """
    settings = config.stream()
    model_config = load_config(settings.model, revision=settings.revision)
    check_reach(model_config, settings.model, settings.length, settings.max_new_tokens)
    model, tokenizer = load_model(
        settings.model, device=str(device), dtype=settings.dtype, revision=settings.revision
    )
    samples = _Samples.open(settings, recipe, tokenizer, config.seed)
    schedule = samples.schedule
    plan = _plan(geometry_of(model_config), settings, samples, recipe)
    _announce(config, plan, samples, recipe, len(heads) if heads else plan.geometry.agents)
    identity = {
        "model": model_identity(settings.model, settings.revision, model, tokenizer),
        "data": samples.identity,
        "continuation": settings.continuation,
        "max_new_tokens": settings.max_new_tokens,
        "dtype": settings.dtype,
        "buffer": schedule.buffer,
        "visits": schedule.visits,
        "validation": len(samples.validation),
    }
    runner = _Runner(settings, recipe, config, model, tokenizer, samples)
    held_out = range(samples.needed, samples.needed + len(samples.validation))
    tracing = Tracing(
        trace=runner.trace,
        attention=runner.attention,
        manifest={
            "model": {"id": settings.model, "revision": settings.revision},
            "identity": identity,
        },
        output_gram=_output_gram(model),
    )
    traces = ModelTraces(
        tracing,
        plan,
        capacity=schedule.size,
        pinned=held_out,
        device=device,
        agents=None if heads is None else slice(heads.start, heads.stop),
    )
    return StreamMaterial(
        traces=traces,
        training=RollingRecords(traces=traces, schedule=schedule),
        identity=identity,
        held_out=held_out,
        recipe=recipe,
    )


@dataclass(frozen=True, kw_only=True)
class _Samples:
    """Prompts by number: those of the training stream, then those of validation."""

    train: Source
    validation: Source
    schedule: Schedule
    needed: int
    """Numbers of the training stream that a training visits."""
    identity: dict[str, Any]

    @classmethod
    def open(
        cls,
        settings: StreamSettings,
        recipe: Recipe,
        tokenizer: PreTrainedTokenizerBase,
        seed: int,
    ) -> _Samples:
        schedule = Schedule(
            buffer=settings.buffer, visits=settings.visits, sequences=recipe.sequences
        )
        needed = schedule.needed(recipe)
        asked = min(needed, recipe.sequences or needed)
        request = DataRequest(
            data=settings.data,
            tasks=settings.task_list,
            length=settings.length,
            seed=seed,
            essays=settings.essays,
        )
        jobs = plan_jobs(request, {"train": asked, "validation": settings.validation}, tokenizer)
        train, validation = jobs.sources
        if len(train) < asked:
            if recipe.sequences:
                raise UsageError(
                    f"--sequences {recipe.sequences}: --data {settings.data} has only "
                    f"{len(train)} for training"
                )
            schedule = replace(schedule, sequences=len(train))
        return cls(
            train=train,
            validation=validation,
            schedule=schedule,
            needed=schedule.needed(recipe),
            identity=request.identity(jobs.tasks),
        )

    def sample(self, number: int, step: int = 0) -> Sample:
        """The prompt of a sequence, or the one `step` prompts further in the stream."""
        if number >= self.needed:
            return self.validation[number - self.needed]
        return self.train[(number + step) % len(self.train)]


@dataclass(frozen=True)
class _Runner:
    """Runs the model over prompts."""

    settings: StreamSettings
    recipe: Recipe
    config: TrainConfig
    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    samples: _Samples

    def trace(self, number: int) -> Trace:
        """One sequence with its queries."""
        return collect(
            self.model,
            self.tokenizer,
            self._sample(number),
            index=number,
            continuation=self.settings.continuation,
            max_new_tokens=self.settings.max_new_tokens,
            labels=_labels(self.recipe),
        )

    def attention(self, record: SequenceRecord) -> list[Attention]:
        """What training, validation or calibration will ask about a sequence."""
        recipe, seed = self.recipe, self.config.seed
        if record.index < self.samples.needed:
            draws = self.samples.schedule.draws(record.index, recipe, seed=seed)
            cuts = [draw_cut(record, recipe, seed=seed, draw=draw) for draw in draws]
            labels = [recipe.label]
        else:
            cuttable = bool(cuts_by_kind(record, recipe))
            cuts = held_out_cuts([record], recipe, limit=2) if cuttable else []
            calibration = self.config.calibration
            labels = [recipe.label, "attention"]
            labels += [] if calibration == "none" else [TARGETS[calibration][0]]
        known = [label for label in labels if label in FROM_TRACE]
        return [(label, cut.tokens, cut.stop) for cut in cuts for label in known]

    def _sample(self, number: int) -> Sample:
        """The prompt of a sequence; in training one too short to cut is replaced by the next."""
        if number >= self.samples.needed:
            return self.samples.sample(number)
        for step in range(len(self.samples.train)):
            sample = self.samples.sample(number, step)
            if self._can_be_cut(sample):
                return sample
        raise UsageError(
            f"--data {self.settings.data}: no prompt is longer than --cut_min {self.recipe.cut_min}"
        )

    def _can_be_cut(self, sample: Sample) -> bool:
        """Whether a prompt can be cut whatever the continuation turns out to be."""
        prompt = encode(sample, self.tokenizer)
        record = SequenceRecord(
            index=0,
            id=sample.id,
            task=sample.task,
            split=sample.split,
            length=prompt.prompt_length,
            context_length=prompt.context_length,
            prompt_length=prompt.prompt_length,
            token_ids=prompt.ids,
        )
        return bool(cuts_by_kind(record, self.recipe))


def _labels(recipe: Recipe) -> tuple[str, ...]:
    return () if recipe.label in FROM_TRACE else (recipe.label,)


def _plan(
    geometry: Geometry, settings: StreamSettings, samples: _Samples, recipe: Recipe
) -> StorePlan:
    """What is held: attention at the cuts known ahead, or queries where that is less."""
    schedule = samples.schedule
    visits = schedule.visits if schedule.rolls else schedule.passes(recipe)
    cuts = max(visits * recipe.cuts_per_visit, 3)  # validation sequences: two, three labels each
    plan = StorePlan(
        geometry=geometry,
        dtype=settings.dtype,
        max_tokens=settings.max_tokens,
        sequences=schedule.size + len(samples.validation),
        store="importance",
        grid=cuts,
        grid_dtype="float32",
        labels=_labels(recipe),
    )
    with_queries = replace(plan, store="qkv", grid=0)
    return min(plan, with_queries, key=_most_bytes)


def _most_bytes(plan: StorePlan) -> int:
    return planned_bytes(
        plan.geometry,
        dtype=plan.dtype,
        tokens=plan.sequences * plan.max_tokens,
        store=plan.store,
        grid=plan.grid,
        grid_dtype=plan.grid_dtype,
        labels=len(plan.labels),
    )


def _announce(
    config: TrainConfig, plan: StorePlan, samples: _Samples, recipe: Recipe, agents: int
) -> None:
    """Say what will be held and what will run; UsageError where it does not fit."""
    per_sequence = _most_bytes(plan) * agents // (plan.geometry.agents * plan.sequences)
    most, bound = per_sequence * plan.sequences, int(config.memory_gb * 1e9) * 3 // 4
    size, held_out = samples.schedule.size, len(samples.validation)
    if most > bound:
        room = bound // per_sequence - held_out
        smaller = f"use --buffer {room} or " if room > 0 else "use "
        raise UsageError(
            f"--buffer {size} and --validation {held_out} may take {most / 1e9:.3g} GB, three "
            f"quarters of --memory_gb {config.memory_gb:g} are {bound / 1e9:.3g}; {smaller}"
            f"--memory_gb {most / 1e9 * 4 / 3 + 0.05:.1f}"
        )
    kept = "queries" if plan.store_queries else "their attention"
    print(
        f"buffer: {size} sequences and {held_out} for validation, at most {most / 1e9:.3g} GB of "
        f"RAM (keys, values and {kept}, {plan.dtype}); {samples.needed + held_out} sequences of "
        f"at most {plan.max_tokens} tokens will run through {config.stream().model}"
    )


def _output_gram(model: PreTrainedModel) -> torch.Tensor | None:
    """What calibration needs of the model; None where its attention modules cannot be told."""
    try:
        return output_gram(model)
    except ModelError:
        return None
