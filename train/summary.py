"""What a training prints: its scope, at its end a table of every head, and what comes next."""

from __future__ import annotations

import shlex

from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table
from torch import Tensor

from kvp.geometry import Geometry
from policies.ranker import HeadRankers
from train.job import Job
from train.validation import HeldOut

SHARD_FOLDER = "heads-{start}-{stop}"
"""Folder in `--out` of a process that trains some heads (`train.head_shards`)."""
SHOWN_BUDGETS = ("12.5%", "25%", "50%")
"""Budgets that fit into 80 columns; the policy's file has all of them."""


def print_summary(
    result: HeldOut, best_step: Tensor, geometry: Geometry, heads: range | None = None
) -> None:
    """Print the metrics of every head, and where its policy loses to a heuristic.

    Args:
        result: held-out metrics of the exported weights, heuristics included.
        best_step: [A] int64 step the exported weights of every head come from.
        geometry: layers and heads, for the labels.
        heads: which heads of the model the result is about, None for all.
    """
    names = head_names(geometry, heads)
    table = Table(
        title=f"{result.contexts} held-out contexts; budgets: share of the attention lost there",
        caption=(
            "skill in keeping attention: 0 random, 1 ideal order of the tokens that are not "
            "protected; excess: lost beyond the ideal order, mean over budgets"
        ),
        box=SIMPLE,
        padding=(0, 1, 0, 0),
        pad_edge=False,
    )
    for column in ("head", "skill", "excess", *SHOWN_BUDGETS):
        table.add_column(column, justify="right")
    for column in ("best heuristic", "params", "step"):
        table.add_column(column, justify="right", no_wrap=True)
    columns = [result.skill, result.excess, *(result.lost[budget] for budget in SHOWN_BUDGETS)]
    best = result.best_heuristics()
    for index, name in enumerate(names):
        numbers = [f"{float(column[index]):.3f}" for column in columns]
        baseline = best[index]
        heuristic = "" if baseline is None else f"{baseline[0]} {baseline[1]:.3f}"
        step = str(int(best_step[index]))
        table.add_row(name, *numbers, heuristic, f"{result.parameters:,}", step)
    table.add_section()
    means = [f"{float(column.nanmean()):.3f}" for column in columns]
    baselines = [baseline[1] for baseline in best if baseline is not None]
    mean = f"{sum(baselines) / len(baselines):.3f}" if baselines else ""
    table.add_row("all", *means, mean, "", "")
    console = Console()
    console.print(table)
    if result.heuristics:
        console.print(verdict(result, names), highlight=False, markup=False)


def head_names(geometry: Geometry, heads: range | None = None) -> list[str]:
    """Names of heads, LAYER.HEAD, the layer as the model counts it, from 0."""
    indices = range(geometry.total_kv_heads) if heads is None else heads
    layers, width = geometry.model_layers, geometry.kv_heads
    return [f"{layers[index // width]}.{index % width}" for index in indices]


def verdict(result: HeldOut, names: list[str]) -> str:
    """Which heads the policy loses to the best heuristic on, in one sentence; names are [A]."""
    best, losing = result.best_heuristics(), result.losing_heads()
    compared = sum(baseline is not None for baseline in best)
    if not compared:
        return "No head saw tokens that differ: nothing to compare with heuristics."
    if not losing:
        return f"The policy beats the best attention-free heuristic on all {compared} heads."
    lost = []
    for index in losing:
        baseline = best[index]
        assert baseline is not None, "a head without a baseline loses to none"
        skill = float(result.skill[index])
        lost.append(f"{names[index]} ({baseline[0]} {baseline[1]:.3f} > {skill:.3f})")
    return (
        f"The policy loses to the best attention-free heuristic on {len(losing)} of {compared} "
        f"heads: {', '.join(lost)}."
    )


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
    each = sum(weight.numel() for weight in rankers.parameters()) // len(job.heads)
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
