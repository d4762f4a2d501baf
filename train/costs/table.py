"""The table of ways that dry runs print, the sentence that recommends one, and its commands."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from typing import Any

from rich.filesize import decimal

from kvp.config_groups import AnswerConfig, DataConfig, Group, ModelConfig, RunConfig
from kvp.costs import span
from train.config import TrainConfig
from train.costs.of_model import GRID_LABEL
from train.costs.plan import GRID, Plan
from train.costs.ways import ONLINE, WAYS, Cost, Seconds
from train.labels.label import label_of

_COLUMNS = ("way", "disk", "RAM", "GPU", "collecting", "training", "in all")
_SHARED = (ModelConfig, DataConfig, AnswerConfig, RunConfig)
"""Groups that kvp-collect and kvp-train have in common."""


def table_lines(plan: Plan, seconds: Seconds, costs: Sequence[Cost]) -> list[str]:
    """The plan in a line, a row per way, and where each number comes from."""
    rows = [_COLUMNS, *map(_row, costs)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        "  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]) for row in rows
    ]
    lengths, recipe = plan.lengths, plan.recipe
    lines.insert(
        0,
        f"{plan.geometry}, {plan.model.parameters / 1e9:.3g} B parameters, {plan.dtype}; "
        f"{plan.train} training and {plan.validation} validation sequences of "
        f"{'at most' if lengths.bound else 'about'} {lengths.prompt} + {lengths.answer} tokens; "
        f"{recipe.steps:,} steps of {recipe.contexts} contexts",
    )
    if "importance" not in plan.stores:
        lines.append(f"no importance store: --inputs {recipe.inputs} need queries")
    lines += [
        f"disk, RAM and GPU memory: counted, with --memory_gb {plan.memory_gb} (about 1 GB of RAM "
        "for the program on top)",
        f"times: {seconds.source}",
    ]
    large = [cost.way for cost in costs if cost.memory.device_bytes > seconds.device_bytes]
    if large:
        lines.append(
            f"warning: {', '.join(large)}: more than the {decimal(round(seconds.device_bytes))} of "
            "one GPU; --quantization 8bit or 4bit makes the model smaller, --activation_gb the "
            "training"
        )
    return lines


def recommendation(cost: Cost, others: Sequence[Cost]) -> str:
    """One sentence: the way, what it takes, and when another one is better."""
    disk = f"{decimal(cost.disk_bytes)} on disk" if cost.disk_bytes else "nothing on disk"
    text = f"recommended: {cost.way}, {span(cost.seconds)} in all and {disk}"
    if cost.way != ONLINE:
        return text
    stores = [other for other in others if other.disk_bytes]
    again = min(stores, key=lambda other: other.train_seconds)
    return (
        f"{text}; to train many policies on the same sequences, collect once "
        f"({again.way}: {span(again.train_seconds)} each after collecting)"
    )


def commands(cost: Cost, plan: Plan) -> list[str]:
    """The commands of a way, from prompts to a policy, with the settings of the plan."""
    config = plan.config
    shared = _changed(config, {one.name: one.default for kind in _SHARED for one in fields(kind)})
    if cost.memory.device_bytes and config.device == "cpu":
        shared = [*(flag for flag in shared if not flag.startswith("--device ")), "--device cuda"]
    collecting, label = _label_flags(config, cost.way)
    ending = [
        f"--memory_gb {plan.memory_gb}",
        *_training_flags(config, label),
        f"--out {shlex.quote(config.out)}",
    ]
    if cost.way == ONLINE:
        sizes = [
            f"--sequences {plan.train}",
            f"--buffer {plan.buffer}",
            f"--validation_sequences {plan.validation}",
        ]
        sizes += [f"--epochs_per_sequence {plan.epochs}"] if plan.epochs else []
        return [" ".join(["kvp-train", ONLINE, *shared, *sizes, *ending])]
    folder = shlex.quote(f"{config.out}-traces")
    sizes = [f"--train {plan.train}", f"--validation {plan.validation}"]
    if cost.way == WAYS["importance"]:
        sizes.append(f"--store importance --grid {GRID}")
    device = [flag for flag in shared if flag.startswith(("--device ", "--seed "))]
    return [
        " ".join(["kvp-collect", *shared, *sizes, *collecting, f"--out {folder}"]),
        " ".join(["kvp-train", f"--traces {folder}", *device, *ending]),
    ]


def _row(cost: Cost) -> tuple[str, ...]:
    memory = cost.memory
    return (
        cost.way,
        decimal(cost.disk_bytes) if cost.disk_bytes else "none",
        decimal(round(memory.ram_bytes)),
        decimal(round(memory.device_bytes)) if memory.device_bytes else "-",
        span(cost.collect_seconds),
        span(cost.train_seconds),
        span(cost.seconds),
    )


def _label_flags(config: TrainConfig, way: str) -> tuple[list[str], str]:
    """Flags of kvp-collect for the label that is trained, and the label.

    An importance store cannot hold a label of one's own: there it is another.
    """
    name = config.recipe().label
    label = label_of(name)
    if way == ONLINE:
        return [], name
    if label.stored is not None:
        return [f"--labels {label.stored}"], name
    if way == WAYS["qkv"] or label.in_grid == GRID_LABEL:
        return [], name
    return ([f"--grid_labels {label.in_grid}"], name) if label.in_grid else ([], GRID_LABEL)


def _training_flags(config: TrainConfig, label: str) -> list[str]:
    """Flags of kvp-train that differ from its defaults and that a command does not have yet."""
    groups = TrainConfig(out=config.out, source="model", preset=config.preset)
    elsewhere = {*vars(config.online()), "out", "source", "traces", "sequences", "memory_gb"}
    elsewhere |= {"device", "seed", "dry_run", "rates", "rate"}
    names = [one.name for one in fields(TrainConfig) if one.name not in elsewhere]
    defaults = {name: getattr(groups, name) for name in names} | {"preset": "fourier"}
    return _changed(replace(config, label=label), defaults)


def _changed(config: Group, defaults: Mapping[str, Any]) -> list[str]:
    """`--name value` of settings that differ from `defaults`."""
    changed = {name: getattr(config, name) for name in defaults}
    return [
        f"--{name} {shlex.quote(str(value).lower() if isinstance(value, bool) else str(value))}"
        for name, value in changed.items()
        if value != defaults[name] and value is not None
    ]
