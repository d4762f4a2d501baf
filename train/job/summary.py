"""What a training prints and shows: its scope, charts, a table of every head, and what is next."""

import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table
from torch import Tensor

from kvp.data.tasks import GROUPS, TASKS
from kvp.data.tasks.ruler_qa import FLAGS as QA_FLAGS
from kvp.geometry import Geometry
from kvp.names import NANO
from kvp.plugins import is_object_name
from kvp.specification import split_list
from policies.ranker import HeadRankers
from train.data.training_data import recorded_text
from train.job.prepare import Job
from train.learning.validation import HeldOut

SHOWN_BUDGETS = ("12.5%", "25%", "50%")
"""Budgets that fit into 80 columns; the policy's file has all of them."""
SHOWN_HEADS = 20
"""Rows of the table; of more heads it shows those of least skill."""
FEWEST = 8
"""Held-out contexts, two of a sequence, from which on policy and heuristics are compared."""
CHARTED_BUDGET = "12.5%"
"""Budget at which TensorBoard shows the attention that is kept."""
CHARTS = {
    "training": {
        "loss or reward": ["Multiline", ["train/(loss|reward)$"]],
        "held-out skill, by layer": ["Multiline", ["skill_by_layer/.*"]],
        f"attention kept with {CHARTED_BUDGET} of the cache, by layer": [
            "Multiline",
            ["kept_by_layer/.*"],
        ],
    }
}
"""What TensorBoard's page of custom scalars shows."""


def print_start(job: Job, rankers: HeadRankers) -> None:
    """Print heads, parameters, sequences, label, objective, steps and device of a run."""
    recipe, data = job.recipe, job.training_data
    weights = sum(weight.numel() for weight in rankers.parameters()) // len(job.heads)
    print(
        f"training {len(job.heads)} of {job.traces.geometry.total_kv_heads} KV heads, {weights:,} "
        f"parameters each, on {len(data.training)} sequences ({len(data.validation)} for "
        f"validation): label {recipe.label}, objective {recipe.objective}, {recipe.steps:,} steps "
        f"of {recipe.contexts} contexts, {job.device}",
        flush=True,
    )


def print_summary(result: HeldOut, best_step: Tensor, geometry: Geometry, heads: range) -> None:
    """Print held-out metrics of the weights of `heads`, exported from `best_step` [A] int64."""
    best, names = result.best_heuristics(), head_names(geometry, heads)
    weakest = "" if len(names) <= SHOWN_HEADS else f"; the {SHOWN_HEADS} heads of least skill"
    table = Table(
        title=f"{result.contexts} held-out contexts, all later attention{weakest}",
        caption="skill in keeping attention: 0 random, 1 ideal order; lost: attention at a budget",
        box=SIMPLE,
        padding=(0, 1, 0, 0),
        pad_edge=False,
    )
    for column in ("head", "skill", *(f"lost\n{budget}" for budget in SHOWN_BUDGETS)):
        table.add_column(column, justify="right")
    for column in ("best heuristic", "step"):
        table.add_column(column, justify="right", no_wrap=True)
    columns = [result.skill, *(result.lost[budget] for budget in SHOWN_BUDGETS)]
    order = sorted(range(len(names)), key=result.skill.nan_to_num(2.0).tolist().__getitem__)
    for index in sorted(order[:SHOWN_HEADS]):
        numbers = [f"{float(column[index]):.3f}" for column in columns]
        heuristic = "" if (pair := best[index]) is None else f"{pair[0]} {pair[1]:.3f}"
        table.add_row(names[index], *numbers, heuristic, str(int(best_step[index])))
    table.add_section()
    means = [f"{float(column.nanmean()):.3f}" for column in columns]
    skills = [pair[1] for pair in best if pair is not None]
    mean = f"{sum(skills) / len(skills):.3f}" if skills else ""
    table.add_row("all", *means, mean, "")
    Console().print(table)
    if result.contexts < FEWEST:
        print(f"No verdict from {result.contexts} held-out contexts: {FEWEST} are the least.")
    elif skills:
        print(
            f"More skill than the best attention-free heuristic on "
            f"{len(skills) - result.count_losing_heads()} of {len(skills)} heads."
        )


def head_names(geometry: Geometry, heads: range) -> list[str]:
    """Names of heads, LAYER.HEAD, the layer as the model counts it, from 0."""
    layers, width = geometry.model_layers, geometry.kv_heads
    return [f"{layers[head // width]}.{head % width}" for head in heads]


def means_by_layer(held_out: HeldOut, geometry: Geometry, heads: range) -> dict[str, Tensor]:
    """Means of a validation over heads, and layer by layer; skill without signal counts as 0."""
    layers = [name.partition(".")[0] for name in head_names(geometry, heads)]
    skill, kept = held_out.skill.nan_to_num(0.0).cpu(), 1 - held_out.lost[CHARTED_BUDGET].cpu()
    means = {"held_out/skill": skill.mean(), "held_out/worst_head": skill.min()}
    for layer in dict.fromkeys(layers):
        in_layer = torch.tensor([other == layer for other in layers])
        for name, values in (("skill", skill), ("kept", kept)):
            means[f"{name}_by_layer/{layer.zfill(2)}"] = values[in_layer].mean()
    return means


def print_end(job: Job) -> None:
    """Print the written folder and the next command."""
    folder = shlex.quote(str(job.target.place))
    print(f"policy: {folder}")
    if job.whole:
        flags = choose_flags_of_eval(job.traces.manifest, str(job.target.place))
        print("next: kvp eval", *(f"--{flag} {shlex.quote(text)}" for flag, text in flags.items()))
    else:
        print(f"next, when all heads are trained: kvp merge --shards {folder},... --out POLICY")


def choose_flags_of_eval(traces: Mapping[str, Any], policy: str) -> dict[str, str]:
    """Flags that evaluate a policy on the model and data of its traces, of which this is the
    manifest; what the traces do not say is written in capitals.
    """
    usual = {"dtype": "float32", "revision": None, "chat_template": True, "essays": None}
    recorded = {**usual, **traces.get("config", {}), **traces["model"]}
    changed = {flag: recorded[flag] for flag in usual if recorded[flag] != usual[flag]}
    return {
        "model": _model_flag(str(traces["model"].get("id"))),
        "policies": policy,
        **_data_flags(recorded_text(traces).get("data", {}), recorded.get("tasks", "")),
        **{flag: str(value or "false") for flag, value in changed.items()},
        "prompts": "10",
        "methods": "full,kvp,kvp+global,keydiff,nulls",
        "out": f"{policy}-results",
    }


def _model_flag(name: str) -> str:
    """The model of traces as a flag names it; traces record a folder's name without its place."""
    if name == NANO or "/" in name:
        return name
    folder = Path("models", name)
    return str(folder) if folder.is_dir() else "MODEL"


def _data_flags(data: Mapping[str, Any], tasks: str) -> dict[str, str]:
    """Tasks or a file as the flags name them, of the data that a manifest and --tasks recorded."""
    if (built := data.get("tasks")) and {*QA_FLAGS.values()}.isdisjoint(data):  # without files
        users = [task for task in split_list(tasks) if task not in (*TASKS, *GROUPS)]
        flags = (task if is_object_name(task) else "TASK" for task in users)  # objects: no name
        named = [task if task in TASKS else next(flags, "TASK") for task in built]
        return {"tasks": ",".join(named), "length": str(data["length"])}
    if Path(str(data.get("name"))).is_file():
        return {"tasks": "data", "data": data["name"], "length": str(data["length"])}
    return {}
