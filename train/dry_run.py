"""`kvp-train --dry-run` without traces: what each way to get them takes, and the training.

Bytes are counted from the model's configuration; seconds are those of a few sequences that run
through the model, and of a training on them.
"""

from __future__ import annotations

from dataclasses import replace

from rich.filesize import decimal
from transformers import PreTrainedConfig

from kvp.costs import COMPRESSED, how_measured, seconds_of, span
from kvp.errors import ModelError, UsageError
from kvp.hf import geometry_of, load_config, load_tokenizer
from kvp.hf.loading import torch_device
from kvp.hf.model_size import default_batch_size, running_bytes
from kvp.hf.trace import check_reach
from kvp.store import planned_bytes
from train.config import TrainConfig
from train.costs import training_bytes, training_seconds
from train.distributed import ALONE
from train.job import prepare
from train.online.settings import SEQUENCES
from train.online.training_data import Prompts, kept_bytes, memory_gb_for, plan_of

_VALIDATION = 2
"""Validation sequences that are traced."""


def print_costs(config: TrainConfig) -> None:
    """Print bytes of all ways and seconds of `--source model`, where model and device are there.

    Raises ModelError and UsageError as the training itself would, as far as it can be known.
    """
    model_config = load_config(config.model, revision=config.revision)
    check_reach(model_config, config.model, config.length, config.max_new_tokens)
    sequences, prompts, absent = config.recipe().sequences or SEQUENCES, None, ""
    try:
        tokenizer = load_tokenizer(config.model, revision=config.revision)
    except ModelError as error:
        absent = str(error)
    else:
        prompts = Prompts.of(config, config.recipe(), tokenizer)
        sequences = len(prompts.training)
    for line in ways(config, model_config, sequences):
        print(line)
    if prompts is not None:
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
    geometry, recipe, settings = geometry_of(model_config), config.recipe(), config.online()
    validation, tokens = settings.validation_sequences, settings.max_tokens
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

    plan = plan_of(geometry, settings, recipe, sequences, validation)
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


def _times(config: TrainConfig, model_config: PreTrainedConfig, sequences: int) -> str:
    """Train on a few sequences, as often drawn as in the whole training, and add up."""
    recipe, settings = config.recipe(), config.online()
    few = default_batch_size(model_config, dtype=config.dtype, max_tokens=settings.max_tokens)
    few = min(few, sequences)
    job = prepare(
        replace(
            config,
            source="model",
            sequences=few,
            validation_sequences=min(_VALIDATION, settings.validation_sequences),
            steps=max(1, recipe.steps * few // sequences),
            devices=1,
        ),
        ALONE,
        None,
    )
    _ = job.training_data.validation  # the first sequences warm up
    traced = seconds_of(lambda: job.training_data.training, job.device) / few
    total = (sequences + settings.validation_sequences) * traced
    seconds = training_seconds(job)
    steps = recipe.steps * seconds.step
    each = (recipe.compress_prompt > 0) + (recipe.compress_context > 0) or 1
    rest = seconds.held_out(config, each * settings.validation_sequences) + seconds.start
    return (
        f"{sequences + settings.validation_sequences} sequences of {traced:.3g} s through the "
        f"model: {span(total)}; {recipe.steps:,} steps of {seconds.step:.3g} s: {span(steps)}; "
        f"{span(rest)} of statistics, validations and calibration; {span(total + steps + rest)} in "
        f"all without a store ({how_measured(job.device)})"
    )
