"""The prompts of online collection, and the model that runs over them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from kvp.data.collection_plan import data_identity, plan_collection
from kvp.data.encode import encode
from kvp.data.sample import Sample, Source
from kvp.data.task import TaskSettings
from kvp.errors import UsageError
from kvp.hf.batch_size import default_batch_size
from kvp.hf.trace import Recorded, collect_all
from kvp.store import SequenceRecord, Trace
from train.calibration.fit import TARGET_LABELS
from train.config import TrainConfig
from train.data.compression_points import (
    draw_point,
    held_out_points,
    points_by_kind,
    shortest_prefix,
)
from train.labels import EVALUATED
from train.labels.label import label_of
from train.online.schedule import Schedule
from train.online.settings import OnlineSettings
from train.online.trace_buffer import Attention
from train.recipe import Recipe

HELD_OUT_ATTENTION = 6
"""Attentions kept of a validation sequence at most: three labels at two points."""


@dataclass(frozen=True, kw_only=True)
class Samples:
    """Prompts by number: those of training, then those of validation."""

    train: Source
    validation: Source
    schedule: Schedule
    needed: int
    """Training prompts that the run needs."""
    identity: dict[str, Any]
    notes: tuple[str, ...]
    """Notes on the data for the user, one line each."""

    @classmethod
    def open(
        cls,
        settings: OnlineSettings,
        recipe: Recipe,
        tokenizer: PreTrainedTokenizerBase,
        seed: int,
    ) -> Samples:
        """Plan the prompts of a training; UsageError for data that cannot work."""
        schedule = Schedule(
            buffer=settings.buffer,
            epochs_per_sequence=settings.epochs_per_sequence,
            sequences=recipe.sequences,
        )
        needed = schedule.needed(recipe)
        requested = min(needed, recipe.sequences or needed)
        request = TaskSettings.of(settings, seed=seed, needs_reply=settings.answers == "reference")
        jobs = plan_collection(
            request, {"train": requested, "validation": settings.validation_sequences}, tokenizer
        )
        train, validation = jobs.sources
        if len(train) < requested:
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
            identity=data_identity(request, jobs.tasks),
            notes=jobs.notes,
        )

    def sample(self, number: int, step: int = 0) -> Sample:
        """The prompt of a sequence, or the one `step` prompts later."""
        if number >= self.needed:
            return self.validation[number - self.needed]
        return self.train[(number + step) % len(self.train)]


@dataclass(frozen=True)
class Runner:
    """Runs the model over prompts."""

    settings: OnlineSettings
    recipe: Recipe
    config: TrainConfig
    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    samples: Samples

    def traces(self, numbers: Iterable[int]) -> Iterator[Trace]:
        """Sequences with their queries, in the order in which they end."""
        recorded = Recorded(
            continuation=self.settings.answers,
            max_new_tokens=self.settings.max_new_tokens,
            labels=stored_labels(self.recipe),
        )
        samples = ((number, self._sample(number)) for number in numbers)
        for traced in collect_all(
            self.model, self.tokenizer, samples, recorded, rows=self.batch_size
        ):
            yield traced.trace()

    @property
    def batch_size(self) -> int:
        """Prompts whose answers are decoded together."""
        settings = self.settings
        return default_batch_size(
            self.model.config, dtype=settings.dtype, max_tokens=settings.max_tokens
        )

    def attention(self, record: SequenceRecord) -> list[Attention]:
        """Importance of a sequence that training, validation or calibration will need."""
        recipe, seed = self.recipe, self.config.seed
        if record.index < self.samples.needed:
            draws = self.samples.schedule.draws(record.index, recipe, seed=seed)
            points = [draw_point(record, recipe, seed=seed, draw=draw) for draw in draws]
            labels = [recipe.label]
        else:
            long_enough = bool(points_by_kind(record, recipe))
            points = held_out_points([record], recipe, limit=2) if long_enough else []
            calibration = self.config.calibration
            labels = [recipe.label, EVALUATED]
            labels += [] if calibration == "none" else [TARGET_LABELS[calibration]]
        computed = [label for label in labels if label_of(label).from_queries is not None]
        return [(label, point.prefix_length, point.stop) for point in points for label in computed]

    def _sample(self, number: int) -> Sample:
        """The prompt of a sequence; in training the next one replaces one that is too short."""
        if number >= self.samples.needed:
            return self.samples.sample(number)
        for step in range(len(self.samples.train)):
            sample = self.samples.sample(number, step)
            if long_enough(sample, self.tokenizer, self.recipe):
                return sample
        raise UsageError(
            f"--data {self.settings.data}: no prompt {too_short(self.recipe, self.settings.length)}"
        )


def long_enough(sample: Sample, tokenizer: PreTrainedTokenizerBase, recipe: Recipe) -> bool:
    """Whether a prompt is long enough to compress whatever its answer turns out to be."""
    prompt = encode(sample, tokenizer)
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
    return bool(points_by_kind(record, recipe))


def too_short(recipe: Recipe, length: int) -> str:
    """End of a message about prompts of at most `length` tokens that are too short to compress."""
    limit = f"--min_prefix {shortest_prefix(recipe)}"
    return f"is longer than {limit}; lower it or raise --length {length}"


def stored_labels(recipe: Recipe) -> tuple[str, ...]:
    """Labels that are computed with a trace and stored with it."""
    stored = label_of(recipe.label).stored
    return () if stored is None else (stored,)
