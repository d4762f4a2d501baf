"""Cross-entropy between the tokens' shares of the future attention and the softmax of the scores.

    loss = - sum_i (w_i / W) log softmax(s)_i,    W = sum_i w_i

Minimal where softmax(s) is the share, so its scores are log shares up to a constant per context. It
needs no sampled rankings, and has its minimum at the order of the all-budgets cost (descending w).
"""

from __future__ import annotations

import torch
from torch import Tensor

from train.objectives.objective_batch import Batch
from train.recipe import Recipe


def objective(batch: Batch, recipe: Recipe) -> tuple[Tensor, dict[str, float]]:
    """Mean cross-entropy of the contexts that count, [A] (`train.objectives.objective_batch`)."""
    losses = [cross_entropy(s, w) for s, w in zip(batch.scores, batch.importances, strict=True)]
    return batch.mean(torch.stack(losses)), {}


def cross_entropy(scores: Tensor, importance: Tensor) -> Tensor:
    """- sum_i (w_i / W) log softmax(s)_i in nats: two [..., N] of one dtype -> [...]; 0 if W is."""
    total = importance.sum(-1, keepdim=True).clamp_min(torch.finfo(scores.dtype).tiny)  # [..., 1]
    share = importance / total  # [..., N]
    return -(share * scores.log_softmax(-1)).sum(-1)
