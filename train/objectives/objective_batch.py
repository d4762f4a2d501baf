"""Input of every objective: the scored contexts of one optimiser step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from kvp.errors import UsageError
from kvp.metrics import has_signal
from kvp.plugins import own_errors
from train.objectives import OBJECTIVES
from train.recipe import Recipe


@dataclass(frozen=True, kw_only=True)
class Batch:
    """C contexts, whose numbers of tokens N may differ, for A heads."""

    scores: Sequence[Tensor]
    """Per context [A, N] floating point, differentiable."""
    importances: Sequence[Tensor]
    """Per context [A, N], >= 0, importance of the tokens (`Recipe.label`)."""
    counted: Tensor
    """[C, A] bool, heads that learn from a context."""
    seeds: Sequence[int]
    """Per context, the seed of its noise."""
    heads: slice = field(default_factory=lambda: slice(None))
    """Which heads of the model the A are."""
    model_heads: int | None = None
    """Heads of the model, None for A: noise is drawn for all of them, so that a run of some heads
    draws what a run of all draws for them."""
    across: Callable[[Tensor], Tensor] = lambda tensor: tensor
    """Sum of a tensor over the processes that share the contexts of a step; nothing to add in one
    process. Every statistic over contexts goes through it."""

    def mean(self, values: Tensor) -> Tensor:
        """Mean over contexts of [C, A] values, for each head over those that count: [A], or 0.

        This process's share of it where processes share the contexts: shares add up to the mean.
        """
        total = self.across(self.counted.sum(0))  # [A] contexts that count
        return values.where(self.counted, 0.0).sum(0) / total.clamp_min(1)


Objective = Callable[[Batch, Recipe], tuple[Tensor, dict[str, float]]]
"""Loss of every head, [A], of which the sum is minimised, and numbers for the log."""


def objective_of(name: str) -> Objective:
    """The objective of a name in `OBJECTIVES`; UsageError where there is none that can be used."""
    objective: Objective = OBJECTIVES.load(name)
    if not callable(objective):
        raise UsageError(f"--objective {name} is not a function")
    return objective


def losses_of(
    objective: Objective, batch: Batch, recipe: Recipe
) -> tuple[Tensor, dict[str, float]]:
    """Loss of every head and numbers for the log; UsageError where a user's own objective fails."""
    what = f"--objective {recipe.objective}"
    with own_errors(objective, what):
        losses, logged = objective(batch, recipe)
        heads = batch.counted.shape[1]
        if losses.ndim != 1 or len(losses) != heads:
            shape = tuple(losses.shape)
            raise UsageError(f"{what} returned losses {shape}, expected one for each head: {heads}")
    return losses, logged


def learnable(importance: Tensor) -> Tensor:
    """Heads that learn from a context (`kvp.metrics.has_signal`): [A, N] -> [A] bool."""
    return has_signal(importance)


def mean_of_counted(values: Tensor, counted: Tensor) -> Tensor:
    """Mean of [C, A] values over the pairs that count; 0 where none does."""
    return values.where(counted, 0.0).sum() / counted.sum().clamp_min(1)


def top_entropy(scores: Tensor) -> Tensor:
    """Entropy of the first pick over that of a uniform pick: [A, N] -> [A], in [0, 1]."""
    log_share = scores.log_softmax(-1)  # [A, N]
    entropy = -(log_share.exp() * log_share).sum(-1)  # [A], nats
    return entropy / torch.tensor(float(scores.shape[-1])).log()
