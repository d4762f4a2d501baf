"""`kvp train --dry_run`: RAM for the traces of a model, or the time of a training on a store."""

from __future__ import annotations

from lightning.pytorch.callbacks import LambdaCallback
from rich.filesize import decimal

from kvp.costs import in_words, read_clock
from kvp.hf import geometry_of, load_config
from kvp.hf.trace import check_reach
from kvp.progress import phase
from train.config import TrainConfig
from train.data.model_traces import SEQUENCES, memory_gb_for, plan_memory
from train.distributed import ALONE
from train.job.fit import fit
from train.job.prepare import Job, prepare
from train.job.summary import print_start
from train.recipe import Recipe
from train.training import RankerTraining

_STEPS = 5
"""Steps that are measured, after one in which a GPU loads its kernels."""


def print_costs(config: TrainConfig, recipe: Recipe) -> None:
    """Print what a training takes. Raises as the training itself would, as far as can be known."""
    if config.source == "model":
        _print_memory(config, recipe)
    else:
        _print_time(prepare(config, recipe, ALONE, None))


def _print_memory(config: TrainConfig, recipe: Recipe) -> None:
    """Print what the traces of `--source model` take, from the model's configuration alone."""
    model_config = load_config(config.model, revision=config.revision)
    check_reach(model_config, config.model, config.length, config.max_new_tokens)
    geometry = geometry_of(model_config)
    training, validation = recipe.sequences or SEQUENCES, config.validation_sequences
    _, kept = plan_memory(geometry, config, recipe, training, validation)
    print(
        f"{geometry}, {config.dtype}; {training} training and {validation} validation sequences of "
        f"at most {config.length} + {config.max_new_tokens} tokens take {decimal(kept)} of RAM "
        f"(--memory_gb {max(memory_gb_for(kept), config.memory_gb):g}); {recipe.steps:,} steps of "
        f"{recipe.contexts} contexts\ndry run: nothing was written"
    )


def _print_time(job: Job) -> None:
    """Take a few steps of a training on a store and print what all of them take."""
    rankers = job.initial_rankers()
    print_start(job, rankers)
    phase("measuring a few steps")
    times: list[float] = []

    def note(*_: object) -> None:
        times.append(read_clock(job.device))

    clock = LambdaCallback(on_train_start=note, on_train_batch_end=note)
    module = RankerTraining.of(job, rankers)
    fit(module, clock, device=job.device, steps=min(_STEPS + 1, job.recipe.steps))
    first = 1 if job.recipe.steps > 1 else 0
    each = (times[-1] - times[first]) / (len(times) - 1 - first)
    print(
        f"{job.recipe.steps:,} steps of {each:.3g} s: about "
        f"{in_words(job.recipe.steps * each, job.device)} by one process; less where --memory_gb "
        "holds contexts that were made before, and validation and calibration on top\n"
        "dry run: nothing was written"
    )
