"""Seconds of the parts of a training, measured on a job: a few real steps, labels and evaluations.

Everything is measured as the training does it, with contexts that are at hand or with the making of
contexts alone. Heads and lengths are those of the job.
"""

from __future__ import annotations

import statistics
from dataclasses import replace
from itertools import pairwise

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback

from kvp.errors import UsageError
from kvp.stopwatch import now, seconds_of
from policies.ranker import HeadRankers
from train.costs.ways import StoreSeconds, TrainingSeconds
from train.data.compression_points import (
    CompressionPoint,
    draw_point,
    drawn_points,
    held_out_points,
)
from train.fit import fit, new_training
from train.job import Job, initial_rankers
from train.model.feature_statistics import spread
from train.validation import evaluate, evaluate_with_baselines

_STEPS = 3
"""Steps that are measured, after one that warms up."""
_DRAWN_STEPS = 25
"""Steps whose mean length counts; at least those that are measured."""
_CONTEXTS = 4
"""Held-out contexts that are evaluated at most."""
_SEQUENCES = 3
"""Sequences that are read, and whose labels are made, at most."""


def training_seconds(job: Job) -> TrainingSeconds:
    """Measure steps, in all processes that train together, and evaluations.

    Raises UsageError where no validation sequence is long enough.
    """
    device, source = job.device, job.source(job.recipe.label)
    rankers = initial_rankers(job)
    step = _step_seconds(job, rankers)
    points = job.held_out(min(job.config.validation_contexts, _CONTEXTS))
    if not points:
        raise UsageError("no validation sequence is long enough to be compressed")
    contexts = [source.context(point) for point in points]
    rankers.to(device)
    evaluated = seconds_of(
        lambda: evaluate(rankers, contexts, reward_protection=job.protection), device, rounds=2
    )
    compared = seconds_of(
        lambda: evaluate_with_baselines(
            rankers,
            contexts,
            job.traces.geometry,
            reward_protection=job.protection,
            heads=job.heads,
        ),
        device,
    )
    return TrainingSeconds(
        step=step, evaluated=evaluated / len(points), compared=compared / len(points)
    )


def store_seconds(job: Job) -> StoreSeconds:
    """Measure reading and labels of the job's traces; nothing is written."""
    source, recipe, traces = job.source(job.recipe.label), job.recipe, job.traces
    source.forget()
    records = spread(job.training_data.first)[:_SEQUENCES]
    read = traces.trace if traces.plan.store_queries else traces.kv
    reading = [seconds_of(lambda i=record.index: read(i), job.device) for record in records]  # type: ignore[misc]
    uniform = replace(recipe, compress_prompt=0.0, compress_context=0.0, compress_uniform=1.0)
    exact: list[float] = []
    anywhere: list[float] = []
    for record in records:
        drawn = [draw_point(record, uniform, seed=0, draw=draw) for draw in range(3)]
        source.context(drawn[0])  # reads the sequence
        met = {drawn[0]}
        for found, points in (
            (exact, held_out_points([record], recipe, limit=2)),
            (anywhere, drawn),
        ):
            for point in points:
                if point not in met:
                    met.add(point)
                    found.append(_label_seconds(job, point))
    return StoreSeconds(
        read=min(reading),
        exact=statistics.median(exact or anywhere or [0.0]),
        anywhere=statistics.median(anywhere or exact or [0.0]),
    )


def _label_seconds(job: Job, point: CompressionPoint) -> float:
    """Seconds of the label of a context beside what the context takes each time."""
    source = job.source(job.recipe.label)
    first = seconds_of(lambda: source.context(point), job.device)
    return max(first - seconds_of(lambda: source.context(point), job.device), 0.0)


class _Clock(Callback):
    """Notes when the steps of a training end."""

    def __init__(self, device: torch.device) -> None:
        self.ends: list[float] = []
        self._device = device

    def on_train_batch_end(
        self, trainer: pl.Trainer, module: pl.LightningModule, *args: object
    ) -> None:
        """Note the time."""
        self.ends.append(now(self._device))


def _step_seconds(job: Job, rankers: HeadRankers) -> float:
    """Seconds of a mean step of this process, its contexts at hand; the fastest per token count."""
    recipe, records = job.recipe, job.training_data.training
    source, clock = job.source(recipe.label), _Clock(job.device)

    def drawn(step: int) -> list[CompressionPoint]:
        slots = job.workers.share(range(recipe.contexts))
        return list(drawn_points(records, recipe, seed=job.config.seed, step=step, slots=slots))

    tokens = [sum(point.prefix_length for point in drawn(step)) for step in range(_DRAWN_STEPS)]
    steps = min(_STEPS + 1, recipe.steps)
    for step in range(min(steps + 1, recipe.steps)):  # contexts are made a step ahead
        for point in drawn(step):
            source.context(point)
    start = now(job.device)
    fit(new_training(job, rankers), [clock], device=job.device, steps=steps, workers=job.workers)
    ends = pairwise([start, *clock.ends])
    each = [(after - before) / n for (before, after), n in zip(ends, tokens, strict=False)]
    return min(each[1:] or each) * statistics.mean(tokens)
