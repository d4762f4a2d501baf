"""Messages of a training: at its start, at its end and instead of it (`--dry_run`)."""

from __future__ import annotations

import shlex
import time
from itertools import islice

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback
from rich.filesize import decimal

from kvp.errors import UsageError
from kvp.progress import phase
from policies.ranker import HeadRankers
from train.fit import fit, new_training
from train.head_range import SHARD_FOLDER
from train.job import Job, initial_rankers
from train.validation import evaluate

_COPIES = 6
"""Tensors as large as a weight: weight, gradient, two moments, average, best."""
_MEASURED_STEPS = 3
"""Steps that a dry run measures, after one that warms up."""
_MEASURED_CONTEXTS = 4
"""Held-out contexts that a dry run evaluates at most."""


def print_start(job: Job, rankers: HeadRankers) -> None:
    """Print the scope of the run, and where there is less data than the flags ask for."""
    for line in (_scope(job, rankers), *_shortages(job)):
        print(line, flush=True)


def print_end(job: Job) -> None:
    """Print the written folder and the next command."""
    folder = shlex.quote(str(job.target.place))
    print(f"policy: {folder}")
    if not job.whole:
        own = SHARD_FOLDER.format(start=job.heads.start, stop=job.heads.stop)
        among_others = job.target.folder.name == own
        shards = shlex.quote(str(job.target.folder.parent)) if among_others else f"{folder},..."
        print(f"next: kvp-merge --shards {shards} --out POLICY, when all heads are trained")
        return
    model = shlex.quote(str(job.traces.manifest["model"].get("id")))
    print(f"next: kvp-eval --model {model} --policies {folder} --out RESULTS")


def dry_run(job: Job) -> None:
    """Measure a few steps of a training and print its cost; nothing is written.

    Processes that train together all do this: they share the steps, and the first one prints.
    """
    rankers = initial_rankers(job)
    if job.workers.first:
        print_start(job, rankers)
        print(_memory(job, rankers))
        phase("measuring a few steps and validations")
    per_step = _seconds_per_step(job, rankers)
    if not job.workers.first:
        return
    steps, shared = job.recipe.steps, job.workers.count
    contexts = job.held_out(job.config.validation_contexts)
    per_context = _seconds_per_context(job, rankers)
    validations = -(-steps // job.config.validate_every) + 1
    total = steps * per_step + validations * len(contexts) * per_context
    by = "" if shared == 1 else f" by {shared} processes"
    print(
        f"{steps:,} steps of {per_step:.3g} s and {validations} validations of "
        f"{len(contexts) * per_context:.3g} s: about {_duration(total)} (measured here on "
        f"{min(_MEASURED_STEPS, steps)} steps{by}; baselines and calibration come on top)"
    )
    print("dry run: nothing was written")


def _memory(job: Job, rankers: HeadRankers) -> str:
    """One line: size of the policy, and what its training takes in each process."""
    size = 4 * sum(weight.numel() for weight in rankers.materialise().parameters())
    line = f"policy: {decimal(size)} on disk; {decimal(_COPIES * size)} of memory while training"
    if job.workers.count == 1:
        return line
    each = f"in each of {job.workers.count} processes"
    return f"{line} and up to --memory_gb {job.config.memory_gb:g}, {each}"


def _scope(job: Job, rankers: HeadRankers) -> str:
    """One line: heads, parameters, sequences, label, objective, steps and device."""
    recipe, data = job.recipe, job.training_data
    heads = f"{len(job.heads)} of {job.traces.geometry.total_kv_heads} KV heads"
    each = sum(weight.numel() for weight in rankers.materialise().parameters()) // len(job.heads)
    start = "" if job.initial is None else f", starting from {job.config.init_from}"
    return (
        f"training {heads}, {each:,} parameters each, on {len(data.training)} sequences "
        f"({len(data.validation)} for validation): label {recipe.label}, objective "
        f"{recipe.objective}, {recipe.steps:,} steps of {recipe.contexts} contexts, "
        f"{job.device}{start}"
    )


def _shortages(job: Job) -> list[str]:
    """A line where the validation sequences give fewer contexts than flags ask for."""
    flags = {"validation_contexts": job.config.validation_contexts}
    if job.config.calibration != "none":
        flags["calibration_contexts"] = job.config.calibration_contexts
    available = len(job.held_out(max(flags.values())))
    short = [f"--{name} {count}" for name, count in flags.items() if count > available]
    if not short:
        return []
    return [
        f"note: {len(job.training_data.validation)} validation sequences give {available} held-out "
        f"contexts, fewer than {' and '.join(short)}"
    ]


class _Clock(Callback):
    """Notes when the steps of a training end."""

    def __init__(self) -> None:
        self.ends: list[float] = []

    def on_train_batch_end(
        self, trainer: pl.Trainer, module: pl.LightningModule, *args: object
    ) -> None:
        """Note the time."""
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self.ends.append(time.perf_counter())


def _seconds_per_step(job: Job, rankers: HeadRankers) -> float:
    clock = _Clock()
    start = time.perf_counter()
    steps = min(_MEASURED_STEPS + 1, job.recipe.steps)
    fit(new_training(job, rankers), [clock], device=job.device, steps=steps, workers=job.workers)
    times = [start, *clock.ends]
    measured = times[1:] if len(times) > 2 else times
    return (measured[-1] - measured[0]) / (len(measured) - 1)


def _seconds_per_context(job: Job, rankers: HeadRankers) -> float:
    source = job.source(job.recipe.label)
    points = list(islice(job.held_out(job.config.validation_contexts), _MEASURED_CONTEXTS))
    if not points:
        raise UsageError("no validation sequence is long enough to be compressed")
    start = time.perf_counter()
    evaluate(rankers.to(job.device), map(source.context, points), reward_protection=job.protection)
    return (time.perf_counter() - start) / len(points)


def _duration(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
