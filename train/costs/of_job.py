"""`kvp-train --dry-run` on a store: what the training at hand takes, measured on its own job."""

from __future__ import annotations

from statistics import mean

from rich.filesize import decimal

from kvp.costs import Lengths, span
from kvp.progress import phase
from kvp.stopwatch import how_measured, one_thread, speedup
from kvp.store import StoreKind
from train.costs.measured import store_seconds, training_seconds
from train.costs.memory import COPIES
from train.costs.plan import TrainingPlan
from train.costs.ways import labels_seconds, steps_seconds
from train.job import Job, initial_rankers
from train.summary import print_start


def print_costs_of_job(job: Job) -> None:
    """Measure a few steps, labels and evaluations and print their cost; nothing is written.

    Processes that train together all do this: they share the steps, and the first one prints.
    """
    workers = job.workers
    if workers.first:
        print_start(job, initial_rankers(job))
        print(_memory(job))
        phase("measuring a few steps, labels and evaluations")
    with one_thread() as threads:
        seconds = training_seconds(job)
        if not workers.first:
            return
        of_store = store_seconds(job)
    store: StoreKind = "qkv" if job.traces.plan.store_queries else "importance"
    plan = _planned(job)
    faster = 1.0 if job.device.type != "cpu" else speedup(threads)
    steps, rest = (part / faster for part in steps_seconds(plan, seconds))
    labels = labels_seconds(plan, of_store, store) / faster / workers.count
    shared = "" if workers.count == 1 else f" by {workers.count} processes"
    total = rest + (steps + labels if job.device.type == "cpu" else max(steps, labels))
    print(
        f"{job.recipe.steps:,} steps of {steps / job.recipe.steps:.3g} s{shared}, {span(labels)} "
        f"of reading and labels, {span(rest)} of validations and calibration: about "
        f"{span(total)} ({how_measured(job.device, threads)})"
    )
    print("dry run: nothing was written")


def _planned(job: Job) -> TrainingPlan:
    data = job.training_data
    records = [*data.first, *data.validation]
    prompt = round(mean(record.prompt_length for record in records))
    tokens = round(mean(record.length for record in records))
    return TrainingPlan(
        config=job.config,
        geometry=job.traces.geometry,
        dtype=job.traces.plan.dtype,
        lengths=Lengths(prompt=prompt, answer=tokens - prompt, bound=False),
        train=len(data.training),
        validation=len(data.validation),
    )


def _memory(job: Job) -> str:
    """One line: size of the policy, and what its training takes in each process."""
    weights = initial_rankers(job).parameters()
    size = 4 * sum(weight.numel() for weight in weights)
    line = f"policy: {decimal(size)} on disk; {decimal(COPIES * size)} of memory while training"
    if job.workers.count == 1:
        return line
    each = f"in each of {job.workers.count} processes"
    return f"{line} and up to --memory_gb {job.config.memory_gb:g}, {each}"
