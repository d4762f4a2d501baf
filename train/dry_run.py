"""`kvp-train --dry-run`: what a training takes, by a few of its own steps and evaluations.

Without traces, what each way to get them takes, too: bytes are counted from the model's
configuration, seconds are those of a few sequences that run through the model. What is left out:
start-up, and the speed-up by several processes.
"""

from __future__ import annotations

import math
from dataclasses import replace

from rich.filesize import decimal
from transformers import PreTrainedConfig

from kvp.costs import AT_WORK, COMPRESSED, seconds_of, span, told
from kvp.errors import ModelError, UsageError
from kvp.geometry import Geometry
from kvp.hf import geometry_of, load_config
from kvp.hf.loading import tokenizer_of, torch_device
from kvp.hf.model_size import default_batch_size, running_bytes
from kvp.hf.trace import check_reach
from kvp.progress import phase
from kvp.store import planned_bytes
from policies.ranker import bytes_per_token, parameters_per_head
from train.compression_points import drawn_points
from train.config import TrainConfig
from train.distributed import ALONE
from train.fit import fit
from train.initial_rankers import ranker_spec
from train.job import Job, prepare
from train.model_traces import SEQUENCES, Prompts, kept_bytes, memory_gb_for, plan_of
from train.recipe import Recipe
from train.summary import print_start
from train.validation import Heuristics, evaluate

_STEPS = 5
"""Steps that are measured, after one that warms up."""
_CONTEXTS = 4
"""Contexts that are made, and held-out ones that are evaluated."""
_VALIDATION = 2
"""Validation sequences that are traced."""
_COPIES = 6
"""Tensors as large as a ranker's weights: weight, gradient, two moments, average, best."""


def print_costs_of_job(job: Job) -> None:
    """Measure a training on a store and print what it takes; nothing is written.

    Of processes that train together the first one does, alone.
    """
    if not job.workers.first:
        return
    devices, job = job.workers.count, replace(job, workers=ALONE)
    print_start(job, job.initial_rankers())
    phase("measuring a few steps, contexts and evaluations")
    seconds, parts = _training_time(job, job.recipe.steps, len(job.held_out(10**9)))
    longest = max(record.length for record in job.training_data.training)
    needed = training_bytes(job.recipe, job.config, job.traces.geometry, longest)
    print(
        f"memory: {decimal(needed)} of rankers and steps, and up to --memory_gb "
        f"{job.config.memory_gb:g} of traces"
    )
    print(f"{parts}: about {told(seconds, job.device)}")
    if devices > 1:
        print(f"note: by one process; --devices {devices} share the contexts of a step")
    print("dry run: nothing was written")


def print_costs(config: TrainConfig) -> None:
    """Print bytes of all ways and seconds of `--source model`, where model and device are there.

    Raises ModelError and UsageError as the training itself would, as far as it can be known.
    """
    model_config = load_config(config.model, revision=config.revision)
    check_reach(model_config, config.model, config.length, config.max_new_tokens)
    recipe, absent = config.recipe(), ""
    sequences = recipe.sequences or SEQUENCES
    try:
        tokenizer = tokenizer_of(config)
        sequences = Prompts.of(config, recipe, tokenizer).training
    except ModelError as error:
        absent = str(error)
    for line in ways(config, model_config, sequences):
        print(line)
    if not absent:
        try:
            torch_device(config.device)
            print(_times(config, model_config, sequences))
        except (ModelError, UsageError) as error:
            absent = str(error)
    if absent:
        print(f"no times, which are measured on the model itself: {absent}")
    elif config.devices > 1:
        print(
            f"note: by one process; --devices {config.devices} share the contexts of a step, each "
            "runs the model over all sequences"
        )
    print("dry run: nothing was written")


def ways(config: TrainConfig, model_config: PreTrainedConfig, sequences: int) -> list[str]:
    """Bytes of both ways to the traces of a training: without a store, and with one.

    Rankers read recent queries (`recent`, with `--inputs auto`) where full traces hold them alone.
    """
    geometry, recipe = geometry_of(model_config), config.recipe()
    validation, tokens = config.validation_sequences, config.max_tokens
    together = default_batch_size(model_config, dtype=config.dtype, max_tokens=tokens)
    running = running_bytes(
        model_config,
        dtype=config.dtype,
        quantization=config.quantization,
        tokens=tokens,
        together=together if config.answers == "model" else 0,
    )

    def step(queries: bool) -> int:
        return training_bytes(recipe.for_traces(queries=queries), config, geometry, tokens)

    plan = plan_of(geometry, config, recipe, sequences, validation)
    kept = kept_bytes(plan, recipe, sequences, validation)
    raw = planned_bytes(geometry, dtype=config.dtype, tokens=(sequences + validation) * tokens)
    return [
        f"{geometry}, {config.dtype}; {sequences} training and {validation} validation sequences "
        f"of at most {config.length} + {config.max_new_tokens} tokens; {recipe.steps:,} steps of "
        f"{recipe.contexts} contexts",
        f"no store (--source model): no disk, {decimal(kept)} of RAM (--memory_gb "
        f"{max(memory_gb_for(kept), config.memory_gb):g}), {decimal(running)} where the model runs "
        f"and {decimal(step(plan.store_queries))} of training",
        f"full traces: {decimal(round(raw * COMPRESSED[config.dtype]))} on disk, "
        f"{decimal(running)} where the model runs; then up to --memory_gb of RAM and "
        f"{decimal(step(queries=True))} of training",
    ]


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


def _times(config: TrainConfig, model_config: PreTrainedConfig, sequences: int) -> str:
    """Train on a few sequences, as often drawn as in the whole training, and add up."""
    recipe = config.recipe()
    few = default_batch_size(model_config, dtype=config.dtype, max_tokens=config.max_tokens)
    few = min(few, sequences)
    part = replace(
        config,
        source="model",
        sequences=few,
        validation_sequences=min(_VALIDATION, config.validation_sequences),
        steps=max(1, recipe.steps * few // sequences),
        devices=1,
    )
    job = prepare(part, ALONE, None)
    _ = job.training_data.validation  # the first sequences warm up
    traced = seconds_of(lambda: job.training_data.training, job.device) / few
    total = (sequences + config.validation_sequences) * traced
    # At most two held-out points of a sequence: the ends of its prompt and of its context.
    seconds, parts = _training_time(job, recipe.steps, 2 * config.validation_sequences)
    return (
        f"{sequences + config.validation_sequences} sequences of {traced:.3g} s through the "
        f"model: {span(total)}; {parts}; in all without a store {told(total + seconds, job.device)}"
    )


def _training_time(job: Job, steps: int, held_out: int) -> tuple[float, str]:
    """Seconds of a training of so many steps with so many held-out contexts; its parts in words.

    Contexts count once, as where `--memory_gb` holds them.
    """
    config, recipe, device = job.config, job.recipe, job.device
    source, records = job.source(recipe.label), job.training_data.training
    start = seconds_of(job.initial_rankers, device)
    rankers = job.initial_rankers()
    points = [
        point
        for step in range(recipe.steps)
        for point in drawn_points(records, recipe, seed=config.seed, step=step)
    ]
    few = list(dict.fromkeys(points))[:_CONTEXTS]
    source.forget()
    each = seconds_of(lambda: [source.context(point) for point in few], device) / len(few)
    validated = min(config.validation_contexts, held_out)
    labels = (len(set(points)) * steps / recipe.steps + 2 * validated) * each

    measured = min(_STEPS + 1, recipe.steps)
    for point in points[: (measured + 1) * recipe.contexts]:  # made a step ahead
        source.context(point)
    first, all_steps = (
        seconds_of(lambda n=n: fit(job.module(rankers), [], device=device, steps=n), device)  # type: ignore[misc]
        for n in (1, measured)
    )
    step = (all_steps - first) / (measured - 1) if measured > 1 else first

    contexts = [source.context(point) for point in job.held_out(_CONTEXTS)]
    heuristics = Heuristics(job.traces.geometry, job.heads)
    rankers.to(device)
    evaluated, compared = (
        seconds_of(
            lambda h=h: evaluate(rankers, contexts, reward_protection=job.protection, heuristics=h),  # type: ignore[misc]
            device,
        )
        / len(contexts)
        for h in (None, heuristics)
    )
    evaluations = math.ceil(steps / config.validate_every) * validated
    if config.calibration != "none":
        evaluations += min(config.calibration_contexts, held_out)
    rest = start + evaluations * evaluated + validated * compared
    parts = (
        f"{steps:,} steps of {step:.3g} s, {span(labels)} of reading and labels, {span(rest)} of "
        "statistics, validations and calibration"
    )
    return steps * step + labels + rest, parts
