"""`kvp-train --dry-run`: what a training takes, by a few of its own steps, labels and evaluations.

Bytes are counted. What is left out: start-up, and the speed-up by several processes.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import pairwise
from statistics import mean

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback
from rich.filesize import decimal

from kvp.costs import AT_WORK, how_measured, now, seconds_of, span
from kvp.errors import UsageError
from kvp.geometry import Geometry
from kvp.progress import phase
from kvp.store import SequenceRecord, StoreKind, planned_bytes
from policies.ranker import HeadRankers, bytes_per_token, parameters_per_head
from train.config import TrainConfig
from train.data.compression_points import CompressionPoint, drawn_points
from train.distributed import ALONE
from train.fit import fit, new_training
from train.job import Job, initial_rankers, ranker_spec
from train.model.feature_statistics import spread
from train.recipe import Recipe
from train.summary import print_start
from train.validation import evaluate, evaluate_with_baselines

_STEPS = 5
"""Steps that are measured, after one that warms up."""
_CONTEXTS = 4
"""Held-out contexts that are evaluated."""
_LABELS = 6
"""Contexts that are made."""
_COPIES = 6
"""Tensors as large as a ranker's weights: weight, gradient, two moments, average, best."""
_HELD_OUT_LABELS = 2
"""Labels of a held-out context: the trained one, and another for evaluation or calibration."""


@dataclass(frozen=True, kw_only=True)
class TrainingSeconds:
    """Seconds of the parts of a training whose contexts are at hand."""

    start: float
    """Of the rankers before the first step: feature statistics."""
    step: float
    evaluated: float
    """Of a held-out context, or of one that scores are calibrated on."""
    compared: float
    """Of a held-out context that heuristics rank, too."""

    def held_out(self, config: TrainConfig, available: int) -> float:
        """Seconds of validations, the last evaluation and calibration, of `available` contexts."""
        validated = min(config.validation_contexts, available)
        contexts = math.ceil(config.recipe().steps / config.validate_every) * validated
        if config.calibration != "none":
            contexts += min(config.calibration_contexts, available)
        return contexts * self.evaluated + validated * self.compared


def print_costs_of_job(job: Job) -> None:
    """Measure a training on a store and print what it takes; nothing is written.

    Of processes that train together the first one does, alone.
    """
    if not job.workers.first:
        return
    devices, job = job.workers.count, replace(job, workers=ALONE)
    print_start(job, initial_rankers(job))
    phase("measuring a few steps, labels and evaluations")
    seconds = training_seconds(job)
    labels = _store_seconds(job)
    rest = seconds.start + seconds.held_out(job.config, len(job.held_out(10**9)))
    steps = job.recipe.steps * seconds.step
    lengths = [record.length for record in job.training_data.training]
    needed = training_bytes(job.recipe, job.config, job.traces.geometry, max(lengths))
    print(
        f"memory: {decimal(needed)} of rankers and steps, and up to --memory_gb "
        f"{job.config.memory_gb:g} of traces"
    )
    print(
        f"{job.recipe.steps:,} steps of {seconds.step:.3g} s, {span(labels)} of reading and "
        f"labels, {span(rest)} of statistics, validations and calibration: about "
        f"{span(steps + labels + rest)} ({how_measured(job.device)})"
    )
    if devices > 1:
        print(f"note: by one process; --devices {devices} share the contexts of a step")
    print("dry run: nothing was written")


def training_bytes(recipe: Recipe, config: TrainConfig, geometry: Geometry, tokens: int) -> int:
    """Peak bytes of rankers, optimiser and a step with contexts of at most so many tokens.

    The contexts of this step and the next one in float32, those of this step once more in a row,
    and activations.
    """
    spec = ranker_spec(recipe, geometry)
    heads = geometry.total_kv_heads
    vectors = heads * recipe.contexts * tokens * 2 * geometry.head_dim * 4
    activations = heads * recipe.contexts * tokens * bytes_per_token(spec)
    weights = _COPIES * 4 * heads * parameters_per_head(spec)
    return round(weights + 3 * vectors + min(activations, config.activation_gb * 1e9) + AT_WORK)


def training_seconds(job: Job) -> TrainingSeconds:
    """Measure the parts of a training.

    Raises UsageError where no validation sequence is long enough.
    """
    start = now(job.device)
    rankers = initial_rankers(job)
    started = now(job.device) - start
    step = _step_seconds(job, rankers)
    points = job.held_out(min(job.config.validation_contexts, _CONTEXTS))
    if not points:
        raise UsageError("no validation sequence is long enough to be compressed")
    source = job.source(job.recipe.label)
    contexts = [source.context(point) for point in points]
    rankers.to(job.device)
    evaluate(rankers, contexts[:1], reward_protection=job.protection)
    evaluated = seconds_of(
        lambda: evaluate(rankers, map(source.context, points), reward_protection=job.protection),
        job.device,
    )
    compared = seconds_of(
        lambda: evaluate_with_baselines(
            rankers,
            map(source.context, points),
            job.traces.geometry,
            reward_protection=job.protection,
            heads=job.heads,
        ),
        job.device,
    )
    return TrainingSeconds(
        start=started, step=step, evaluated=evaluated / len(points), compared=compared / len(points)
    )


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
    """Seconds of a mean step, its contexts at hand; a step takes as long as its tokens are many."""
    source, clock = job.source(job.recipe.label), _Clock(job.device)
    steps = min(_STEPS + 1, job.recipe.steps)
    for point in _drawn(job, range(min(steps + 1, job.recipe.steps))):  # made a step ahead
        source.context(point)
    start = now(job.device)
    fit(new_training(job, rankers), [clock], device=job.device, steps=steps)
    ends = [start, *clock.ends][1 if steps > 1 else 0 :]
    measured = range(steps)[1 - len(ends) :]
    seconds = sum(after - before for before, after in pairwise(ends))
    tokens = sum(point.prefix_length for point in _drawn(job, measured))
    all_tokens = sum(point.prefix_length for point in _drawn(job, range(job.recipe.steps)))
    return seconds / tokens * all_tokens / job.recipe.steps


def _drawn(job: Job, steps: Iterable[int]) -> list[CompressionPoint]:
    """The points of some steps."""
    records, recipe, seed = job.training_data.training, job.recipe, job.config.seed
    return [
        point for step in steps for point in drawn_points(records, recipe, seed=seed, step=step)
    ]


def _store_seconds(job: Job) -> float:
    """Seconds in which a training reads its store and makes its labels, within `--memory_gb`."""
    source, traces, data = job.source(job.recipe.label), job.traces, job.training_data
    source.forget()
    read = traces.trace if traces.plan.store_queries else traces.kv
    some = spread(data.training)[:_LABELS]
    reading = mean(seconds_of(lambda i=record.index: read(i), job.device) for record in some)  # type: ignore[misc]
    points = _drawn(job, range(job.recipe.steps))
    labels = []
    for point in list(dict.fromkeys(points))[:_LABELS]:
        source.forget()
        fresh = seconds_of(lambda p=point: source.context(p), job.device)  # type: ignore[misc]
        again = seconds_of(lambda p=point: source.context(p), job.device)  # type: ignore[misc]
        labels.append(fresh - again - reading)
    held_out = _HELD_OUT_LABELS * len(job.held_out(job.config.validation_contexts))
    made, reads = _made_and_read(job, points)
    reads += _HELD_OUT_LABELS * len(data.validation)
    return reads * reading + (made + held_out) * max(mean(labels), 0.0)


def _made_and_read(job: Job, points: list[CompressionPoint]) -> tuple[float, float]:
    """How many labels are made and sequences read in which so many points are trained on.

    Three quarters of `--memory_gb` remember traces, keys and values before queries, and a quarter
    labels (`train.data.contexts`).
    """
    different, sequences = set(points), {point.sequence for point in points}
    memory, drawn = job.config.memory_gb * 1e9, len(points)
    made = len(different)
    label_bytes = 4 * job.traces.geometry.total_kv_heads * sum(p.prefix_length for p in different)
    if label_bytes > memory / 4:  # labels are forgotten and made again
        made = drawn
    records = [*job.training_data.training, *job.training_data.validation]
    room, bare = 0.75 * memory, _bytes_of(job, records, "kv")
    reads = len(sequences) + (drawn - len(sequences)) * (1 - _hits(room / bare))
    if job.traces.plan.store_queries:
        queries = _bytes_of(job, records, "qkv") - bare
        again = (made - len(sequences)) * (1 - _hits((room - bare) / queries))
        whole = len(sequences) + again
        reads = whole + max(reads - whole, 0) * bare / (bare + queries)
    return made, reads


def _bytes_of(job: Job, records: Iterable[SequenceRecord], store: StoreKind) -> int:
    return planned_bytes(
        job.traces.geometry,
        dtype=job.traces.plan.dtype,
        tokens=sum(record.length for record in records),
        store=store,
    )


def _hits(share: float) -> float:
    """Share of reads that find what the least recently used leaves of shuffled passes.

    With room for `share` of all: an item comes back after a share 1 - (1 - a)(1 - v) of the others,
    a and v uniform, so it is still there with probability 1 - c + c ln c, c = 1 - share.
    """
    if not 0 < share < 1:
        return float(share >= 1)
    return share + (1 - share) * math.log(1 - share)
