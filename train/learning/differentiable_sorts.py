"""Differentiable sorting: the control the KVP paper trains (its appendix), and a fairer variant.

Scores are standardised per context, so that a temperature means the same for every head. The loss
of the softened ranks, `--sort_loss`, is `ranks`, the mean squared error against the true ranks over
N^2 (the paper's ablation), or `cost`, the softened cost that RLOO minimises, normalised to `skill`.

The KVP paper does not say which relaxation it used. Here it is the Euclidean projection of Blondel
et al. 2020 (arXiv 2002.08871): the entropic one is as hard below a finite strength and as constant
above. Soft ranks are equivariant under permutations of the tokens, do not change when all scores
shift, and become the hard ranks where their strength goes to 0.
"""

from typing import Any

import numpy as np
import torch
from scipy.optimize import isotonic_regression
from torch import Tensor

from kvp.ranking import rank_tokens
from kvp.reward import skill_reward
from train.learning.losses import Batch, shift_invariant
from train.recipe import Recipe


@shift_invariant
def soft_rank_objective(batch: Batch, recipe: Recipe) -> tuple[Tensor, dict[str, float]]:
    """Loss of every head, [A], by softened ranks."""
    losses = []
    for scores, importance in zip(batch.scores, batch.importances, strict=True):
        ranks = soft_rank(standardise_scores(scores), recipe.temperature)  # [A, N]
        if recipe.sort_loss == "ranks":
            losses.append(rank_error(ranks, importance))
        else:
            losses.append(-skill_reward(importance, (importance * (ranks - 1)).sum(-1)))
    return batch.mean(torch.stack(losses)), {}


def standardise_scores(scores: Tensor) -> Tensor:
    """Scores of a context with mean 0 and standard deviation 1: [..., N] -> [..., N]."""
    centred = scores - scores.mean(-1, keepdim=True)  # [..., N]
    return centred / centred.square().mean(-1, keepdim=True).clamp_min(1e-12).sqrt()


def rank_error(ranks: Tensor, importance: Tensor) -> Tensor:
    """Mean squared error of ranks [..., N] against those of the importance, over N^2: [...]."""
    true = rank_tokens(importance).argsort(-1) + 1  # [..., N]
    return ((ranks - true) / ranks.shape[-1]).square().mean(-1)


def soft_rank(scores: Tensor, strength: float) -> Tensor:
    """Ranks as the point of the permutahedron of (N, ..., 1) that is nearest to -scores / strength.

    [..., N] float32 or float64 -> [..., N], rank 1 for the largest score; O(N log N) per context by
    isotonic regression (scipy, on the CPU). Inside a block of pooled tokens every token moves the
    others' ranks equally; where nothing is pooled the ranks are hard and the gradient is 0.
    """
    ranks: Tensor = _Projection.apply(-scores / strength)  # type: ignore[no-untyped-call]
    return ranks


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
