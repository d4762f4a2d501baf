"""`kvp-train --dry-run` without traces: what every way to a policy would cost.

Only the model's configuration is read, and its tokenizer where it is there; prompts are made with
it to know their lengths. Left out: the dry run on a store that exists (`train.costs.of_job`).
"""

from __future__ import annotations

import math
import os
import statistics
import time
from collections.abc import Sequence
from dataclasses import replace

from transformers import PreTrainedConfig, PreTrainedTokenizerBase

from kvp.config_groups import AnswersName
from kvp.costs import Lengths
from kvp.data.encode import encode
from kvp.data.sample import Sample
from kvp.errors import ModelError
from kvp.hf import load_config, load_tokenizer
from kvp.hf.batch_size import default_batch_size
from kvp.hf.model_size import size_of
from kvp.hf.trace import check_reach
from train.config import TrainConfig
from train.costs.of_model import assumed_seconds, seconds_of_model
from train.costs.plan import Plan
from train.costs.table import commands, recommendation, table_lines
from train.costs.ways import costs_of, recommended
from train.online.model_runner import Samples
from train.online.schedule import Schedule
from train.recipe import Recipe

_ENOUGH = 100
"""Training sequences that learning curves justify (docs/results/training.md)."""
_WHY_ENOUGH = (
    f"{_ENOUGH} training sequences are enough: skill 0.845 with 20 of them, 0.854 with 80, 0.856 "
    "with 300 (nano, docs/results/training.md)"
)
_EPOCHS = 8
"""Epochs per sequence where there are more than the buffer holds and no number is given."""


def print_costs(config: TrainConfig) -> None:
    """Print the table of ways, the recommended one and its commands.

    Raises ModelError and UsageError as the training itself would, as far as it can be known.
    """
    model_config = load_config(config.model, revision=config.revision)
    check_reach(model_config, config.model, config.length, config.max_new_tokens)
    plan = planned(config, model_config)
    if config.rates == "measured":
        seconds = seconds_of_model(plan, model_config)
    else:
        seconds = assumed_seconds(plan, config.rates)
    if config.rate is not None:
        seconds = replace(seconds, sequence=plan.lengths.tokens / config.rate)
        plan = replace(plan, lengths=replace(plan.lengths, make_seconds=0.0))
    costs = costs_of(plan, seconds)
    for line in table_lines(plan, seconds, costs):
        print(line)
    if not config.sequences or config.sequences > _ENOUGH:
        print(f"{_WHY_ENOUGH}; --sequences changes it")
    if config.devices > 1:
        print(_of_one_process(config.devices))
    if config.rate is not None:
        print(f"running the model: {config.rate:g} tokens/s, as --rate says")
    best = recommended(costs, _ram_bytes() if config.rates == "measured" else math.inf)
    print(recommendation(best, costs))
    for command in commands(best, plan):
        print(f"  {command}")
    print("dry run: nothing was written")


def _of_one_process(devices: int) -> str:
    """What the table says of a training by several processes."""
    return (
        f"note: times are of one process, RAM and GPU memory the most that each of --devices "
        f"{devices} takes; they share the contexts of a step, and with --source model each runs "
        "the model for itself. "
        f"kvp-collect is shared by torchrun --nproc-per-node {devices} -m kvp collect"
    )


def planned(config: TrainConfig, model_config: PreTrainedConfig) -> Plan:
    """The policy that a configuration asks for; `_ENOUGH` sequences where it names no number."""
    recipe = config.recipe()
    lengths, sequences = _prompts(config, recipe)
    buffer = sequences if sequences <= max(config.buffer, _ENOUGH) else config.buffer
    epochs = config.epochs_per_sequence or _EPOCHS
    schedule = Schedule(buffer=buffer, epochs_per_sequence=epochs, sequences=sequences)
    size = size_of(model_config)
    batch = default_batch_size(
        model_config, dtype=config.dtype, max_tokens=config.length + config.max_new_tokens
    )
    return Plan(
        config=config,
        geometry=size.geometry,
        dtype=config.dtype,
        model=size,
        lengths=lengths,
        train=sequences,
        validation=config.validation_sequences,
        buffer=schedule.size,
        traced=schedule.needed(recipe),
        kept_points=schedule.points(recipe),
        epochs=epochs if schedule.rolls else 0,
        batch=1 if config.answers == "reference" else min(batch, buffer),
    )


def _prompts(config: TrainConfig, recipe: Recipe) -> tuple[Lengths, int]:
    """How long prompts are and how many are trained on: `_ENOUGH` where no number is named.

    Of data with fewer prompts, all of them. Lengths are those of prompts that are made, or their
    bounds where there is no tokenizer.
    """
    sequences = recipe.sequences or _ENOUGH
    try:
        tokenizer = load_tokenizer(config.model, revision=config.revision)
    except ModelError:
        bounds = Lengths(prompt=config.length, answer=config.max_new_tokens, answers=config.answers)
        return bounds, sequences
    settings = replace(config.online(), buffer=sequences)
    samples = Samples.open(settings, recipe, tokenizer, config.seed)
    lengths = mean_lengths(
        samples.train, tokenizer, answers=config.answers, max_new_tokens=config.max_new_tokens
    )
    return lengths, recipe.sequences or min(_ENOUGH, len(samples.train))


def _ram_bytes() -> float:
    """RAM of this machine; infinite where it is not told."""
    try:
        return float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    except (ValueError, OSError, AttributeError):
        return math.inf


_SAMPLES = 16
"""Prompts that are made, one of each task as a rule."""


def mean_lengths(
    samples: Sequence[Sample],
    tokenizer: PreTrainedTokenizerBase,
    *,
    answers: AnswersName,
    max_new_tokens: int,
) -> Lengths:
    """Mean tokens of the first prompts and their answers.

    A model's answer counts with the most tokens it may have; what a prompt took to be made is the
    processor time of this machine, a median.
    """
    prompts, replies, seconds = [], [], []
    for index in range(min(_SAMPLES, len(samples))):
        start = time.process_time()
        sample = samples[index]
        encoded = encode(sample, tokenizer)
        seconds.append(time.process_time() - start)
        limit = min(max_new_tokens, sample.max_new_tokens)
        prompts.append(encoded.prompt_length)
        replies.append(limit if answers == "model" else min(limit, len(encoded.reply_ids or ())))
    return Lengths(
        prompt=round(sum(prompts) / len(prompts)),
        answer=round(sum(replies) / len(replies)),
        answers=answers,
        bound=False,
        make_seconds=statistics.median(seconds),
    )
