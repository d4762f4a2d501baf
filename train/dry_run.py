"""`kvp train --dry_run`: the RAM that the traces of a model take."""

from __future__ import annotations

from rich.filesize import decimal

from kvp.hf import geometry_of, load_config
from kvp.hf.trace import check_reach
from train.config import TrainConfig
from train.data.model_traces import SEQUENCES, memory_gb_for, plan_memory
from train.recipe import Recipe


def print_memory(config: TrainConfig, recipe: Recipe) -> None:
    """Print what the traces of `--source model` take, from the model's configuration alone.

    Raises as the training itself would, as far as can be known.
    """
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
