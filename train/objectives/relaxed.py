"""Differentiable sorting: the control the KVP paper trains (its appendix), and a fairer variant.

Scores are standardised per context, so that a temperature means the same for every head. The loss
of the softened ranks (`train.objectives.relaxations`), `--sort_loss`:

- `ranks`: mean squared error against the true ranks, over N^2 (the paper's ablation). All ranks
  count equally, though nearly all tokens get no attention and their order means nothing.
- `cost`: the softened version of the cost that RLOO minimises, normalised to `skill`.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from kvp.budgets import BudgetWeights
from kvp.ranking import rank_tokens
from kvp.reward import rank_coefficients, skill_of_cost
from train.objectives.objective_batch import Batch, Objective
from train.objectives.relaxations import mean_at_rank, neural_sort, ranks_of, soft_rank, soft_sort
from train.recipe import Recipe

MAXIMUM_TOKENS = 1024
"""Tokens a permutation matrix is made of; longer contexts are thinned at random."""

Matrix = Callable[[Tensor, float], Tensor]


def soft_rank_objective(batch: Batch, recipe: Recipe) -> tuple[Tensor, dict[str, float]]:
    """Loss of projected ranks, [A] (`train.objectives.objective_batch`)."""
    losses = []
    for scores, importance in zip(batch.scores, batch.importances, strict=True):
        ranks = soft_rank(standardised(scores), recipe.temperature)  # [A, N]
        if recipe.sort_loss == "ranks":
            losses.append(rank_error(ranks, importance))
        else:
            losses.append(-skill_of_cost(importance, (importance * (ranks - 1)).sum(-1)))
    return batch.mean(torch.stack(losses)), {}


def matrix_objective(permutation: Matrix) -> Objective:
    """The objective of a softened permutation matrix, [..., N] -> [..., N, N]."""

    def objective(batch: Batch, recipe: Recipe) -> tuple[Tensor, dict[str, float]]:
        losses = []
        for context, seed in enumerate(batch.seeds):
            kept = thinned(batch.scores[context].shape[-1], seed)
            scores, importance = batch.scores[context], batch.importances[context]
            coefficients = batch.coefficients(recipe, context)
            if kept is not None:
                scores, importance = scores[:, kept], importance[:, kept]
                if coefficients is not None:
                    coefficients = coefficients[evenly(len(coefficients), len(kept))]
            matrix = permutation(standardised(scores), recipe.temperature)  # [A, N, N]
            if recipe.sort_loss == "ranks":
                losses.append(rank_error(ranks_of(matrix), importance))
            else:
                losses.append(-soft_skill(matrix, importance, coefficients))
        return batch.mean(torch.stack(losses)), {}

    return objective


soft_sort_objective = matrix_objective(soft_sort)
neural_sort_objective = matrix_objective(neural_sort)


def standardised(scores: Tensor) -> Tensor:
    """Scores of a context with mean 0 and standard deviation 1: [..., N] -> [..., N]."""
    centred = scores - scores.mean(-1, keepdim=True)  # [..., N]
    return centred / centred.square().mean(-1, keepdim=True).clamp_min(1e-12).sqrt()


def rank_error(ranks: Tensor, importance: Tensor) -> Tensor:
    """Mean squared error of ranks [..., N] against those of the importance, over N^2: [...]."""
    true = rank_tokens(importance).argsort(-1) + 1  # [..., N]
    return ((ranks - true) / ranks.shape[-1]).square().mean(-1)


def soft_skill(matrix: Tensor, importance: Tensor, coefficients: Tensor | None) -> Tensor:
    """Skill of a softened ranking, sum_i w_i E[c of i's rank], [..., N, N] -> [...].

    The mean over ranks takes a token's normalised column. With the matrix as it is,
    sum_r c_r (P w)_r, important tokens can leave the rows altogether (their columns shrink): that
    loss falls without any better ranking.
    """
    if coefficients is None:
        coefficients = rank_coefficients(BudgetWeights(), importance.shape[-1]).to(importance)
    cost = (importance * mean_at_rank(matrix, coefficients)).sum(-1)  # [...]
    return skill_of_cost(importance, cost, coefficients)


def evenly(ranks: int, count: int) -> Tensor:
    """Indices of `count` ranks spread evenly over `ranks`, both ends included."""
    return torch.linspace(0, ranks - 1, count).round().long()


def thinned(tokens: int, seed: int) -> Tensor | None:
    """Ascending indices of `MAXIMUM_TOKENS` random tokens, None where there are no more."""
    if tokens <= MAXIMUM_TOKENS:
        return None
    random = torch.Generator().manual_seed(seed)
    return torch.randperm(tokens, generator=random)[:MAXIMUM_TOKENS].sort().values
