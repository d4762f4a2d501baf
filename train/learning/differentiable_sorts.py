"""Differentiable sorting: the control the KVP paper trains (its appendix), and a fairer variant.

Scores are standardised per context, so that a temperature means the same for every head. The loss
of the softened ranks, `--sort_loss`, is `ranks`, the mean squared error against the true ranks over
N^2 (the paper's ablation), or `cost`, the softened cost that RLOO minimises, normalised to `skill`.

Relaxations take the scores of a context [..., N] float32 or float64 (rank 1 for the largest), are
equivariant under permutations of the tokens, do not change when all scores shift, and become the
hard ranks where their strength goes to 0. The KVP paper does not say which one it used. `soft_rank`
(Blondel et al. 2020, arXiv 2002.08871, the Euclidean projection: the entropic one is as hard below
a finite strength and as constant above) gives ranks; `soft_sort` (Prillo and Eisenschlos 2020,
arXiv 2006.16038) and `neural_sort` (Grover et al. 2019, arXiv 1903.08850) a row-stochastic matrix
[..., N, N], row r for the token at rank r + 1, in O(N^2) memory.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from scipy.optimize import isotonic_regression
from torch import Tensor

from kvp.ranking import rank_tokens
from kvp.reward import skill_of_cost
from train.learning.losses import Batch, Objective
from train.recipe import Recipe

MAXIMUM_TOKENS = 1024
"""Tokens a permutation matrix is made of; longer contexts are thinned at random."""


def sort_objective(
    relaxation: Callable[[Tensor, float], Tensor], *, matrix: bool = True
) -> Objective:
    """The objective of a softened permutation matrix, [..., N] -> [..., N, N], or of soft ranks."""

    def objective(batch: Batch, recipe: Recipe) -> tuple[Tensor, dict[str, float]]:
        first = 1 if recipe.sort_loss == "ranks" else 0
        losses = []
        contexts = zip(batch.scores, batch.importances, batch.seeds, strict=True)
        for scores, importance, seed in contexts:
            kept = thin_tokens(scores.shape[-1], seed) if matrix else None
            if kept is not None:
                scores, importance = scores[:, kept], importance[:, kept]
            soft = relaxation(standardise_scores(scores), recipe.temperature)
            ranks = mean_rank(soft, first) if matrix else soft - (1 - first)  # [A, N]
            if recipe.sort_loss == "ranks":
                losses.append(rank_error(ranks, importance))
            else:
                losses.append(-skill_of_cost(importance, (importance * ranks).sum(-1)))
        return batch.mean(torch.stack(losses)), {}

    return objective


def standardise_scores(scores: Tensor) -> Tensor:
    """Scores of a context with mean 0 and standard deviation 1: [..., N] -> [..., N]."""
    centred = scores - scores.mean(-1, keepdim=True)  # [..., N]
    return centred / centred.square().mean(-1, keepdim=True).clamp_min(1e-12).sqrt()


def rank_error(ranks: Tensor, importance: Tensor) -> Tensor:
    """Mean squared error of ranks [..., N] against those of the importance, over N^2: [...]."""
    true = rank_tokens(importance).argsort(-1) + 1  # [..., N]
    return ((ranks - true) / ranks.shape[-1]).square().mean(-1)


def thin_tokens(tokens: int, seed: int) -> Tensor | None:
    """Ascending indices of `MAXIMUM_TOKENS` random tokens, None where there are no more."""
    if tokens <= MAXIMUM_TOKENS:
        return None
    random = torch.Generator().manual_seed(seed)
    return torch.randperm(tokens, generator=random)[:MAXIMUM_TOKENS].sort().values


def soft_rank(scores: Tensor, strength: float) -> Tensor:
    """Ranks as the point of the permutahedron of (N, ..., 1) that is nearest to -scores / strength.

    [..., N] -> [..., N], O(N log N) per context by isotonic regression (scipy, on the CPU). Inside
    a block of pooled tokens every token moves the others' ranks equally; where nothing is pooled
    the ranks are hard and the gradient is 0.
    """
    ranks: Tensor = _Projection.apply(-scores / strength)  # type: ignore[no-untyped-call]
    return ranks


def soft_sort(scores: Tensor, temperature: float) -> Tensor:
    """Permutation matrix softened by distances to the sorted scores: [..., N] -> [..., N, N].

    Row r is softmax_i(-|s_(r) - s_i| / temperature), s_(r) the r-th largest score.
    """
    ordered = scores.sort(dim=-1, descending=True).values  # [..., N]
    return (-(ordered[..., :, None] - scores[..., None, :]).abs() / temperature).softmax(-1)


def neural_sort(scores: Tensor, temperature: float) -> Tensor:
    """Permutation matrix from sums of absolute differences: [..., N] -> [..., N, N].

    Row r (from 1) is softmax_i(((N + 1 - 2 r) s_i - sum_j |s_i - s_j|) / temperature).
    """
    tokens = scores.shape[-1]
    spread = (scores[..., :, None] - scores[..., None, :]).abs().sum(-1)  # [..., N]
    rank = torch.arange(1, tokens + 1, dtype=scores.dtype, device=scores.device)
    weights = (tokens + 1 - 2 * rank)[:, None] * scores[..., None, :]  # [..., N, N]
    return ((weights - spread[..., None, :]) / temperature).softmax(-1)


def mean_rank(permutation: Tensor, first: int = 1) -> Tensor:
    """Mean rank, counted from `first`, of every token of a soft matrix: [..., N, N] -> [..., N].

    A token's column is normalised first: rows sum to 1, columns only in the hard limit. With the
    matrix as it is important tokens can leave the rows altogether (their columns shrink): a loss of
    such ranks falls without any better ranking.
    """
    tokens = permutation.shape[-1]
    ranks = torch.arange(tokens, dtype=permutation.dtype, device=permutation.device) + first  # [N]
    mass = permutation.sum(-2).clamp_min(torch.finfo(permutation.dtype).tiny)  # [..., N]
    return (ranks[:, None] * permutation).sum(-2) / mass


class _Projection(torch.autograd.Function):
    """Projection of z onto the permutahedron of (N, ..., 1)."""

    @staticmethod
    def forward(ctx: Any, z: Tensor) -> Tensor:  # noqa: ANN401
        ordered, order = z.sort(dim=-1, descending=True, stable=True)
        tokens = z.shape[-1]
        corners = torch.arange(tokens, 0, -1, dtype=z.dtype, device=z.device)
        contexts = (ordered - corners).reshape(-1, tokens).double().cpu().numpy()  # [contexts, N]
        fits = [isotonic_regression(context, increasing=False) for context in contexts]
        pooled = torch.from_numpy(np.stack([fit.x for fit in fits])).to(z).view_as(z)  # [..., N]
        sizes = np.concatenate([np.diff(fit.blocks) for fit in fits])
        blocks = torch.from_numpy(np.repeat(np.arange(len(sizes)), sizes)).to(z.device)
        ctx.save_for_backward(order, blocks, torch.from_numpy(sizes).to(z))
        return torch.zeros_like(z).scatter(-1, order, ordered - pooled)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> Tensor:  # noqa: ANN401
        order, blocks, sizes = ctx.saved_tensors
        ordered = upstream.gather(-1, order)  # [..., N]
        sums = torch.zeros_like(sizes).index_add(0, blocks, ordered.flatten())  # [blocks]
        centred = ordered - (sums / sizes)[blocks].view_as(ordered)  # [..., N], mean 0 per block
        return torch.zeros_like(upstream).scatter(-1, order, centred)


soft_rank_objective = sort_objective(soft_rank, matrix=False)
soft_sort_objective = sort_objective(soft_sort)
neural_sort_objective = sort_objective(neural_sort)
