"""Squared error of the logarithm of importance: the control without a ranking.

    loss = mean_i (s_i - log(w_i + 1e-6))^2

With `--label kvzip_plus` this is KVzap's objective (arXiv 2601.07891) for our network: keys, values
and positions where KVzap reads hidden states.
"""

from __future__ import annotations

import torch
from torch import Tensor

from train.objectives.objective_batch import Batch
from train.recipe import Recipe

FLOOR = 1e-6
"""Added before the logarithm: below it, differences mean nothing."""


def objective(batch: Batch, recipe: Recipe) -> tuple[Tensor, dict[str, float]]:
    """Mean squared error of the contexts that count, [A] (`train.objectives.objective_batch`)."""
    losses = [squared_error(s, w) for s, w in zip(batch.scores, batch.importances, strict=True)]
    return batch.mean(torch.stack(losses)), {}


def squared_error(scores: Tensor, importance: Tensor) -> Tensor:
    """mean_i (s_i - log(w_i + FLOOR))^2: two [..., N] of one dtype -> [...]."""
    return (scores - (importance + FLOOR).log()).square().mean(-1)
