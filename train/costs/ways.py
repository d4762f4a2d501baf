"""The ways to a policy and what each costs: full traces, an importance store, a running model."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kvp.store import StoreKind
from train.costs.memory import Memory, collecting_memory, online_memory, training_memory
from train.costs.plan import Plan, TrainingPlan

ONLINE = "--source model"
"""The way without a store."""
WAYS: dict[StoreKind, str] = {"qkv": "full traces", "importance": "importance store"}
"""The ways with a store, by what it keeps."""
_HELD_OUT_LABELS = 2
"""Labels of a held-out context: the trained one, and another for evaluation or calibration."""


@dataclass(frozen=True, kw_only=True)
class StoreSeconds:
    """Seconds of a sequence, or of a label, of one kind of store."""

    grid: float = 0.0
    """In which the importance grids of a sequence are computed."""
    write: float = 0.0
    """In which a sequence is packed and written."""
    read: float
    """In which a sequence is read: all of a store with queries, keys and values of another."""
    exact: float
    """Of a label, and features, at the end of a prompt or context, what it needs being at hand."""
    anywhere: float
    """The same at a point anywhere."""


@dataclass(frozen=True, kw_only=True)
class TrainingSeconds:
    """Seconds of the parts of a training whose labels are at hand."""

    step: float
    evaluated: float
    """Of a held-out context, or of one that scores are calibrated on."""
    compared: float
    """Of a held-out context that heuristics rank, too."""


@dataclass(frozen=True, kw_only=True)
class Seconds:
    """Seconds of all parts of all ways, on one machine with one model."""

    source: str
    """Where the numbers come from, for people: what was measured, what is assumed."""
    accelerator: bool
    """Whether the model runs beside the processor, with memory of its own."""
    device_bytes: float = math.inf
    """Memory of the accelerator, where it is known."""
    sequence: float
    """In which the model reads a prompt and answers it."""
    stores: Mapping[StoreKind, StoreSeconds]
    training: TrainingSeconds


@dataclass(frozen=True, kw_only=True)
class Cost:
    """What one way costs."""

    way: str
    disk_bytes: int
    """Of the store, compressed; 0 without one."""
    memory: Memory
    """The larger of collecting and training."""
    collect_seconds: float
    train_seconds: float

    @property
    def seconds(self) -> float:
        """Collecting and training once."""
        return self.collect_seconds + self.train_seconds


def costs_of(plan: Plan, seconds: Seconds) -> list[Cost]:
    """A row per way: stores that can be trained on, then no store."""

    def both(first: float, second: float) -> float:
        return max(first, second) if seconds.accelerator else first + second

    run = plan.lengths.make_seconds + seconds.sequence
    steps, held_out = steps_seconds(plan, seconds.training)
    rows = []
    for store in plan.stores:
        of = seconds.stores[store]
        collecting = collecting_memory(plan, seconds.accelerator, store)
        labels = labels_seconds(plan, of, store)
        rows.append(
            Cost(
                way=WAYS[store],
                disk_bytes=plan.stored_bytes(store),
                memory=collecting.larger(training_memory(plan, seconds.accelerator, store)),
                collect_seconds=(plan.train + plan.validation) * both(run + of.grid, of.write),
                train_seconds=both(steps, labels) + held_out,
            )
        )
    exact, anywhere = plan.points(plan.draws / plan.traced)
    of = seconds.stores["qkv"]
    labels = plan.traced * (exact * of.exact + anywhere * of.anywhere)
    labels += _held_out_labels(plan) * of.exact
    model = Cost(
        way=ONLINE,
        disk_bytes=0,
        memory=online_memory(plan, seconds.accelerator),
        collect_seconds=(plan.traced + plan.validation) * run + labels,
        train_seconds=steps + held_out,
    )
    return [*rows, model]


def recommended(costs: Sequence[Cost], ram_bytes: float = math.inf) -> Cost:
    """The fastest way to one policy, of those that fit into RAM; the smallest where none does.

    A way without a store is taken up to a tenth slower, for the disk it saves.
    """
    fitting = [cost for cost in costs if cost.memory.ram_bytes <= ram_bytes]
    if not fitting:
        return min(costs, key=lambda cost: cost.memory.ram_bytes)
    return min(fitting, key=lambda cost: cost.seconds * (1 if cost.disk_bytes else 0.9))


def steps_seconds(plan: TrainingPlan, seconds: TrainingSeconds) -> tuple[float, float]:
    """Seconds of all steps, and of validations, the last evaluation and calibration.

    Labels are at hand.
    """
    config, steps = plan.config, plan.recipe.steps
    validations = -(-steps // config.validate_every)
    contexts = validations * plan.held_out(config.validation_contexts)
    if config.calibration != "none":
        contexts += plan.held_out(config.calibration_contexts)
    last = plan.held_out(config.validation_contexts) * seconds.compared
    return steps * seconds.step, contexts * seconds.evaluated + last


def labels_seconds(plan: TrainingPlan, seconds: StoreSeconds, store: StoreKind) -> float:
    """Seconds in which a training reads a store and makes its labels, within `--memory_gb`."""
    tokens, sequences = plan.lengths.tokens, plan.train + plan.validation
    drawn = min(plan.train, plan.draws)
    exact, anywhere = (plan.train * n for n in plan.points(plan.draws / plan.train))
    label_bytes = 4 * plan.geometry.total_kv_heads * tokens * (exact + anywhere)
    if label_bytes > plan.memory_bytes / 4:  # labels are forgotten and made again
        more = plan.draws / (exact + anywhere)
        exact, anywhere = exact * more, anywhere * more
    room, bare = 0.75 * plan.memory_bytes, sequences * plan.raw_bytes("kv", tokens)
    reads = drawn + (plan.draws - drawn) * (1 - _hits(room / bare))  # keys and values
    if store == "qkv":
        queries = sequences * plan.raw_bytes("qkv", tokens) - bare
        whole = drawn + (exact + anywhere - drawn) * (1 - _hits((room - bare) / queries))
        reads = whole + max(reads - whole, 0) * bare / (bare + queries)
    reads += _HELD_OUT_LABELS * plan.validation
    labels = exact * seconds.exact + anywhere * seconds.anywhere
    return reads * seconds.read + labels + _held_out_labels(plan) * seconds.exact


def _held_out_labels(plan: TrainingPlan) -> int:
    """Labels of held-out contexts."""
    return _HELD_OUT_LABELS * plan.held_out(plan.config.validation_contexts)


def _hits(share: float) -> float:
    """Share of reads that find what the least recently used leaves of shuffled passes.

    With room for `share` of all: an item comes back after a share 1 - (1 - a)(1 - v) of the others,
    a and v uniform, so it is still there with probability 1 - c + c ln c, c = 1 - share.
    """
    if not 0 < share < 1:
        return float(share >= 1)
    return share + (1 - share) * math.log(1 - share)
