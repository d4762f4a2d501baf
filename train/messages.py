"""Messages of a training at its start and at its end."""

from __future__ import annotations

import shlex

from policies.ranker import HeadRankers
from train.head_range import SHARD_FOLDER
from train.job import Job


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
        print(f"next: kvp merge --shards {shards} --out POLICY, when all heads are trained")
        return
    model = shlex.quote(str(job.traces.manifest["model"].get("id")))
    print(f"next: kvp-eval --model {model} --policies {folder} --out RESULTS")


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
