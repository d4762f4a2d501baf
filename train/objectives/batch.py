"""What every objective is given: the scored contexts of one optimiser step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvp.reward import ideal_cost, random_cost
from train.presets import Recipe

FLAT = 1e-3
"""A head has something to learn in a context when the ideal ranking beats a random one by this
fraction of the random cost."""


@dataclass(frozen=True, kw_only=True)
class Batch:
    """C contexts, whose numbers of tokens N may differ, for A heads."""

    scores: Sequence[Tensor]
    """Per context [A, N] floating point, differentiable."""
    importances: Sequence[Tensor]
    """Per context [A, N], >= 0: what the tokens are worth (`Recipe.label`)."""
    counted: Tensor
    """[C, A] bool, heads that learn from a context."""
    seeds: Sequence[int]
    """Per context, the seed of its noise."""


Objective = Callable[[Batch, Recipe], tuple[Tensor, dict[str, float]]]
"""Loss of every head, [A], of which the sum is minimised, and numbers for the log."""


def learnable(importance: Tensor) -> Tensor:
    """Heads for which tokens are not worth the same: [A, N] -> [A] bool."""
    chance = random_cost(importance)
    return chance - ideal_cost(importance) > FLAT * chance


def mean_counted(values: Tensor, counted: Tensor) -> Tensor:
    """Mean over contexts of [C, A] values, for each head over those that count: [A], 0 for none."""
    return values.where(counted, 0.0).sum(0) / counted.sum(0).clamp_min(1)


def mean_of_counted(values: Tensor, counted: Tensor) -> Tensor:
    """Mean of [C, A] values over the pairs that count; 0 where none does."""
    return values.where(counted, 0.0).sum() / counted.sum().clamp_min(1)


def top_entropy(scores: Tensor) -> Tensor:
    """Entropy of the first pick over that of a uniform pick: [A, N] -> [A], in [0, 1]."""
    log_share = scores.log_softmax(-1)
    entropy = -(log_share.exp() * log_share).sum(-1)
    return entropy / torch.tensor(float(scores.shape[-1])).log()
