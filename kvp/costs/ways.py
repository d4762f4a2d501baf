"""The ways to a policy and what each costs: full traces, an importance store, a running model."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from kvp.costs.memory import Memory, collecting_memory, online_memory, training_memory
from kvp.costs.plan import Plan
from kvp.costs.rates import Rates
from kvp.store import StoreKind

ONLINE = "--source model"
"""The way without a store."""
STORES: dict[str, StoreKind] = {"full traces": "qkv", "importance store": "importance"}
"""The ways with a store -> what it keeps."""
_STATISTICS = 64
"""Sequences that features are standardised with (`train.model.feature_statistics`)."""
_EVALUATIONS = 2
"""Labels next to the trained one that the finished policy is evaluated and calibrated on."""
_BASELINE_FLOPS = 6e5
"""What scoring and sorting of all attention-free heuristics takes per token and head, as so many
operations of rankers (measured on nano, docs/costs.md)."""
_PICTURE_SECONDS = 0.6
"""Seconds in which the picture of a validation is drawn for TensorBoard (measured on a CPU)."""
_ONLINE_LABELS = 3
"""Labels that are computed of a validation sequence while the model runs."""


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


def costs_of(plan: Plan, rates: Rates, tokens_per_second: float | None = None) -> list[Cost]:
    """A row per way: both stores, then no store.

    `tokens_per_second`, where the user gives it, replaces the seconds of running the model.
    """
    run = _model_seconds(plan, rates)
    if tokens_per_second is not None:
        run = plan.lengths.tokens / tokens_per_second
    step = step_seconds(plan, rates)
    held_out = _held_out_seconds(plan, rates)
    rows = []
    for way, store in STORES.items():
        read = _reading_seconds(plan, rates, store)
        steps = plan.training.steps * step
        both = max(steps, read) if rates.accelerator else steps + read
        rows.append(
            Cost(
                way=way,
                disk_bytes=plan.stored_bytes(store),
                memory=collecting_memory(plan, rates.accelerator, store).larger(
                    training_memory(plan, rates.accelerator, store)
                ),
                collect_seconds=plan.sequences * _collecting_seconds(plan, rates, store, run),
                train_seconds=both + held_out,
            )
        )
    rows.append(
        Cost(
            way=ONLINE,
            disk_bytes=0,
            memory=online_memory(plan, rates.accelerator),
            collect_seconds=(plan.traced + plan.validation) * run + _labelling_seconds(plan, rates),
            train_seconds=plan.training.steps * (step + _loading_seconds(plan, rates)) + held_out,
        )
    )
    return rows


def recommended(costs: Sequence[Cost], ram_bytes: float = math.inf) -> Cost:
    """The fastest way to one policy, of those that fit into RAM; the smallest where none does.

    A way without a store is taken up to a tenth slower, for the disk it saves.
    """
    fitting = [cost for cost in costs if cost.memory.ram_bytes <= ram_bytes]
    if not fitting:
        return min(costs, key=lambda cost: cost.memory.ram_bytes)
    return min(fitting, key=lambda cost: cost.seconds * (1 if cost.disk_bytes else 0.9))


def step_seconds(plan: Plan, rates: Rates) -> float:
    """Seconds of one training step, its contexts at hand."""
    size, training = plan.ranker, plan.training
    tokens = training.contexts * training.prefix(plan.lengths)
    passes = 8 if plan.recomputed else 6  # forward 2, backward 4, forward again 2
    flops = plan.heads * (tokens * size.products * passes + size.update_flops)
    return flops / rates.ranker_flops


def _model_seconds(plan: Plan, rates: Rates) -> float:
    """Seconds of the model for one sequence.

    Its prompt is made and read once, its answer decoded beside others and read once more in pieces.
    A reference is part of the one pass. Stored labels take two passes over the prompt each.
    """
    size, lengths = plan.model, plan.lengths
    labels = 2 * plan.labels * size.prompt_flops(lengths.prompt)
    if lengths.answers == "reference":
        again = size.prompt_flops(lengths.prompt) if plan.labels else 0
        flops = size.prompt_flops(lengths.tokens) + again + labels
        return lengths.make_seconds + flops / rates.prompt_flops
    flops = size.prompt_flops(lengths.prompt) + size.fed_flops(lengths.answer, lengths.prompt)
    per_step = size.layers * rates.decode_layer_seconds + rates.decode_step_seconds
    decoded = lengths.answer * per_step / plan.batch
    return lengths.make_seconds + (flops + labels) / rates.prompt_flops + decoded


def _collecting_seconds(plan: Plan, rates: Rates, store: StoreKind, run: float) -> float:
    """Seconds of one sequence through the model, in `run` seconds, into a store.

    A thread packs and writes; beside an accelerator it hides behind the model, or hides the model.
    """
    tokens = plan.lengths.tokens
    kept = plan.raw_bytes(store, tokens)
    made, written = run + kept / rates.copy_bytes, kept / rates.write_bytes
    if store == "importance":
        pairs = plan.model.geometry.layers * plan.model.grid_pairs(tokens)
        made += pairs / rates.grid_pairs
        written = kept / rates.write_importance_bytes
    return max(made, written) if rates.accelerator else made + written


def _labelling_seconds(plan: Plan, rates: Rates) -> float:
    """Seconds in which all sequences of a running model come to RAM and get their labels."""
    training, lengths = plan.training, plan.lengths
    heads = plan.model.geometry.layers * plan.model.geometry.query_heads
    counts = training.point_counts(training.draws / max(plan.traced, 1), lengths)
    held_out = training.held_out(1, 2) / 2 * _ONLINE_LABELS
    pairs = plan.traced * training.label_pairs(counts, lengths)
    pairs += plan.validation * training.label_pairs((held_out, held_out, 0), lengths)
    moved = 2 * plan.raw_bytes("qkv", lengths.tokens) * (plan.traced + plan.validation)
    return heads * pairs / rates.pairs + moved / rates.copy_bytes


def _loading_seconds(plan: Plan, rates: Rates) -> float:
    """Seconds in which the contexts of a step come from RAM."""
    tokens = plan.training.contexts * plan.training.prefix(plan.lengths)
    return plan.raw_bytes("kv", round(tokens)) / rates.copy_bytes


def _held_out_seconds(plan: Plan, rates: Rates) -> float:
    """Seconds of validations, of the last evaluation with its baselines and of calibration."""
    training = plan.training
    each = training.held_out(plan.validation, training.validation_contexts)
    rounds = -(-training.steps // training.validate_every)
    contexts = (rounds + 1) * each
    contexts += training.held_out(plan.validation, training.calibration_contexts)
    flops = contexts * 2 * plan.ranker.products + each * _BASELINE_FLOPS
    tokens = plan.heads * training.prefix(plan.lengths)
    return tokens * flops / rates.ranker_flops + rounds * _PICTURE_SECONDS


def _reading_seconds(plan: Plan, rates: Rates, store: StoreKind) -> float:
    """Seconds in which training reads a store and computes labels of its queries."""
    training, lengths, tokens = plan.training, plan.lengths, plan.lengths.tokens
    keys_values, whole = (plan.raw_bytes(kind, tokens) for kind in ("kv", store))
    room = 0.75 * plan.memory_bytes
    drawn = min(plan.train, training.draws)
    labels = _labels(plan)
    held_out = _EVALUATIONS * plan.validation
    kept = min(1.0, room / (plan.sequences * keys_values))
    loads = drawn + (training.draws - drawn) * (1 - _hits(kept)) + plan.validation
    loads += min(_STATISTICS, plan.train)
    if store == "qkv":
        left = max(room - plan.sequences * keys_values, 0)
        queries = _hits(min(1.0, left / (plan.sequences * (whole - keys_values))))
        read = drawn + (sum(labels) - drawn) * (1 - queries) + held_out + plan.validation
        seconds = (read * whole + max(loads - read, 0) * keys_values) / rates.read_bytes
        counts = tuple(labels)
        pairs = training.label_pairs((counts[0], counts[1], counts[2]), lengths)
        both = training.held_out(plan.validation, training.validation_contexts) / 2
        pairs += (1 + _EVALUATIONS) * training.label_pairs((both, both, 0), lengths)
        heads = plan.model.geometry.layers * plan.model.geometry.query_heads
        seconds += heads * pairs / rates.pairs
    else:
        grid = whole - keys_values
        read = (sum(labels) + held_out + plan.validation) * grid
        seconds = read / rates.read_grid_bytes
        seconds += (loads + held_out) * keys_values / rates.read_bytes
    return seconds + training.steps * _loading_seconds(plan, rates)


def _labels(plan: Plan) -> tuple[float, float, float]:
    """Labels of training contexts that are made, by kind of point: each once if all fit."""
    training, lengths = plan.training, plan.lengths
    counts = training.point_counts(training.draws / plan.train, lengths)
    if 4 * plan.heads * lengths.tokens * sum(counts) * plan.train <= plan.memory_bytes / 4:
        return counts[0] * plan.train, counts[1] * plan.train, counts[2] * plan.train
    prompt, context, uniform = training.kinds()
    return training.draws * prompt, training.draws * context, training.draws * uniform


def _hits(share: float) -> float:
    """Share of reads that find what the least recently used leaves of shuffled passes.

    With room for `share` of all: an item comes back after a share 1 - (1 - a)(1 - v) of the others,
    a and v uniform, so it is still there with probability 1 - c + c ln c, c = 1 - share.
    """
    return 1.0 if share >= 1 else share + (1 - share) * math.log(1 - share)
