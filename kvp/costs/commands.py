"""The commands that a dry run recommends, made of the settings that it was called with."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Mapping
from dataclasses import fields
from typing import Any

from kvp.config_groups import AnswerConfig, DataConfig, Group, ModelConfig, RunConfig
from kvp.costs.plan import Plan
from kvp.costs.ways import ONLINE, STORES, Cost

_SHARED = (ModelConfig, DataConfig, AnswerConfig, RunConfig)
"""Groups that kvp-collect and kvp-train have in common."""


def commands_of(
    cost: Cost,
    plan: Plan,
    config: RunConfig,
    *,
    traces: str,
    policy: str,
    training: Iterable[str] = (),
    collecting: Iterable[str] = (),
) -> list[str]:
    """The commands of a way, from prompts to a policy in the folder `policy`.

    `config` has the settings of the groups that kvp-collect and kvp-train share, `training` and
    `collecting` are other flags of kvp-train and kvp-collect, `traces` is the folder of a store,
    for the ways with one.
    """
    shared = changed_flags(config)
    if cost.memory.device_bytes and config.device == "cpu":
        shared = [*(flag for flag in shared if not flag.startswith("--device ")), "--device cuda"]
    out, memory = f"--out {shlex.quote(policy)}", f"--memory_gb {plan.memory_gb}"
    if cost.way == ONLINE:
        sizes = [
            f"--sequences {plan.train}",
            f"--buffer {plan.buffer}",
            f"--validation_sequences {plan.validation}",
        ]
        sizes += [f"--epochs_per_sequence {plan.epochs}"] if plan.epochs else []
        return [" ".join(["kvp-train", ONLINE, *shared, *sizes, memory, *training, out])]
    folder = shlex.quote(traces)
    kind = STORES[cost.way]
    sizes = [f"--train {plan.train}", f"--validation {plan.validation}"]
    sizes += [] if kind == "qkv" else [f"--store {kind}", f"--grid {plan.grid}"]
    device = [flag for flag in shared if flag.startswith(("--device ", "--seed "))]
    return [
        " ".join(["kvp-collect", *shared, *sizes, *collecting, f"--out {folder}"]),
        " ".join(["kvp-train", f"--traces {folder}", *device, memory, *training, out]),
    ]


def changed_flags(config: Group, defaults: Mapping[str, Any] | None = None) -> list[str]:
    """`--name value` of settings that differ from `defaults`, by default of the shared groups."""
    if defaults is None:
        defaults = {one.name: one.default for group in _SHARED for one in fields(group)}
    changed = {name: getattr(config, name) for name in defaults}
    return [
        f"--{name} {shlex.quote(str(value).lower() if isinstance(value, bool) else str(value))}"
        for name, value in changed.items()
        if value != defaults[name] and value is not None
    ]
