"""`kvp-train --dry-run` without traces: what every way to a policy would cost.

Only the model's configuration is read, and its tokenizer where it is there; prompts are made with
it to know their lengths. Left out: the dry run on a store that exists, whose steps are measured
(`train.messages`).
"""

from __future__ import annotations

import math
import os
from dataclasses import fields, replace

from transformers import PreTrainedConfig

from kvp.costs import (
    ENOUGH,
    ONLINE,
    STORES,
    WHY_ENOUGH,
    Cost,
    Lengths,
    Plan,
    TrainingSize,
    costs_of,
    recommendation,
    recommended,
    table_lines,
)
from kvp.costs.commands import changed_flags, commands_of
from kvp.data.lengths import mean_lengths
from kvp.errors import ModelError
from kvp.hf import load_config, load_tokenizer
from kvp.hf.batch_size import default_batch_size
from kvp.hf.model_size import size_of
from kvp.hf.rates import rates_of
from kvp.hf.trace import check_reach
from policies.ranker import RankerSpec
from policies.ranker_rate import ranker_flops_of, size_of_ranker
from train.config import TrainConfig
from train.labels.label import label_of
from train.online.model_runner import Samples, stored_labels
from train.online.schedule import Schedule
from train.recipe import Recipe

_EPOCHS = 8
"""Epochs per sequence where there are more than the buffer holds and no number is given."""
_GRID_LABEL = "max_reply_attention"
"""Label that kvp-collect's grids hold by default."""


def print_costs(config: TrainConfig) -> None:
    """Print the table of ways, the recommended one and its commands.

    Raises ModelError and UsageError as the training itself would, as far as it can be known.
    """
    model_config = load_config(config.model, revision=config.revision)
    check_reach(model_config, config.model, config.length, config.max_new_tokens)
    plan = planned(config, model_config)
    spec = spec_of(config.recipe(), plan.model.geometry.head_dim)
    rates = rates_of(
        config.rates,
        model_config,
        plan,
        device=config.device,
        ranker_flops=ranker_flops_of(spec, plan),
    )
    costs = costs_of(plan, rates, config.rate)
    for line in table_lines(plan, rates, costs):
        print(line)
    if not config.sequences:
        print(f"{WHY_ENOUGH}; --sequences changes it")
    if config.devices > 1:
        print(_of_one_process(config.devices))
    if config.rate is not None:
        print(f"running the model: {config.rate:g} tokens/s, as --rate says")
    ram = math.inf if config.rates != "measured" else _ram_bytes()
    best = recommended(costs, ram)
    print(recommendation(best, costs))
    for command in commands(best, plan, config):
        print(f"  {command}")
    print("dry run: nothing was written")


def _of_one_process(devices: int) -> str:
    """What the table says of a training by several processes."""
    return (
        f"note: times are of one process, RAM and GPU memory the most that each of --devices "
        f"{devices} takes; they share the contexts of a step and what --source model runs over. "
        f"kvp-collect is shared by torchrun --nproc-per-node {devices} -m trace_collect.cli"
    )


def commands(cost: Cost, plan: Plan, config: TrainConfig) -> list[str]:
    """The commands of a way, with the settings of a configuration."""
    collecting, label = _label_flags(config, cost.way)
    return commands_of(
        cost,
        plan,
        config,
        traces=f"{config.out}-traces",
        policy=config.out,
        training=_training_flags(config, label),
        collecting=collecting,
    )


def planned(config: TrainConfig, model_config: PreTrainedConfig) -> Plan:
    """The policy that a configuration asks for; `ENOUGH` sequences where it names no number."""
    recipe = config.recipe()
    lengths, sequences = _prompts(config, recipe)
    buffer = sequences if sequences <= max(config.buffer, ENOUGH) else config.buffer
    epochs = config.epochs_per_sequence or _EPOCHS
    schedule = Schedule(buffer=buffer, epochs_per_sequence=epochs, sequences=sequences)
    size = size_of(model_config)
    batch = default_batch_size(
        model_config, dtype=config.dtype, max_tokens=config.length + config.max_new_tokens
    )
    return Plan(
        model=size,
        dtype=config.dtype,
        quantization=config.quantization,
        lengths=lengths,
        max_tokens=config.length + config.max_new_tokens,
        train=sequences,
        validation=config.validation_sequences,
        ranker=size_of_ranker(spec_of(recipe, size.geometry.head_dim)),
        training=training_size(config),
        buffer=schedule.size,
        traced=schedule.needed(recipe),
        points=schedule.points(recipe),
        leaving=schedule.start(schedule.passes_apart(recipe)) if config.devices > 1 else 0,
        epochs=epochs if schedule.rolls else 0,
        labels=len(stored_labels(recipe)),
        batch=1 if config.answers == "reference" else min(batch, buffer),
    )


def training_size(config: TrainConfig) -> TrainingSize:
    """The training of a configuration as far as its costs go."""
    recipe = config.recipe()
    return TrainingSize(
        steps=recipe.steps,
        contexts=recipe.contexts,
        prompt_weight=recipe.compress_prompt,
        context_weight=recipe.compress_context,
        uniform_weight=recipe.compress_uniform,
        uniform_points=recipe.uniform_points,
        min_prefix=recipe.min_prefix,
        validate_every=config.validate_every,
        validation_contexts=config.validation_contexts,
        calibration_contexts=0 if config.calibration == "none" else config.calibration_contexts,
        activation_bytes=config.activation_gb * 1e9,
        memory_bytes=config.memory_gb * 1e9,
    )


def spec_of(recipe: Recipe, head_dim: int) -> RankerSpec:
    """Rankers of a recipe as far as their costs go."""
    return RankerSpec(
        head_dim=head_dim,
        architecture=recipe.architecture,
        hidden=recipe.hidden,
        max_positions=recipe.max_positions,
        inputs=recipe.input_list,
        blocks=recipe.blocks,
        neighbours=recipe.neighbours,
    )


def _prompts(config: TrainConfig, recipe: Recipe) -> tuple[Lengths, int]:
    """How long prompts are and how many are trained on: `ENOUGH` where no number is named.

    Of data with fewer prompts, all of them. Lengths are those of prompts that are made, or their
    bounds where there is no tokenizer.
    """
    recipe = replace(recipe, sequences=recipe.sequences or ENOUGH)
    try:
        tokenizer = load_tokenizer(config.model, revision=config.revision)
    except ModelError:
        bounds = Lengths(prompt=config.length, answer=config.max_new_tokens, answers=config.answers)
        return bounds, recipe.sequences
    settings = replace(config.online(), buffer=recipe.sequences)
    if not config.recipe().sequences:  # as many as there are
        recipe = replace(recipe, sequences=0)
    samples = Samples.open(settings, recipe, tokenizer, config.seed)
    lengths = mean_lengths(
        samples.train, tokenizer, answers=config.answers, max_new_tokens=config.max_new_tokens
    )
    return lengths, recipe.sequences or min(ENOUGH, len(samples.train))


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
    if STORES[way] == "qkv" or label.in_grid == _GRID_LABEL:
        return [], name
    return ([f"--grid_labels {label.in_grid}"], name) if label.in_grid else ([], _GRID_LABEL)


def _training_flags(config: TrainConfig, label: str) -> list[str]:
    """Flags of kvp-train that differ from its defaults and that a command does not have yet."""
    groups = TrainConfig(out=config.out, source="model", preset=config.preset)
    elsewhere = {*vars(config.online()), "out", "source", "traces", "sequences", "memory_gb"}
    elsewhere |= {"device", "seed", "dry_run", "rates", "rate"}
    names = [one.name for one in fields(TrainConfig) if one.name not in elsewhere]
    defaults = {name: getattr(groups, name) for name in names} | {"preset": "fourier"}
    return changed_flags(replace(config, label=label), defaults)


def _ram_bytes() -> float:
    """RAM of this machine; infinite where it is not told."""
    try:
        return float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    except (ValueError, OSError, AttributeError):
        return math.inf
