"""Optimiser arithmetic of independent heads that train in one job.

Every parameter of the rankers has the head as its first axis. A global gradient norm would let one
head's outlier shrink every other head's step, so norms are per head.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor, nn

WARMUP_START = 0.01
"""Learning rate of the first step as a fraction of the peak (KVP paper, appendix A.2)."""


def learning_rate_factor(step: int, *, steps: int, warmup: int, final_factor: float) -> float:
    """Learning rate of one step (0-based) over the peak: linear warm-up, then cosine.

    Rises from `WARMUP_START` at step 0 to 1 at step `warmup`, then falls to `final_factor`, reached
    at step `steps`.
    """
    if step < warmup:
        return WARMUP_START + (1 - WARMUP_START) * step / warmup
    progress = min((step - warmup) / max(steps - warmup, 1), 1.0)
    return final_factor + (1 - final_factor) * (1 + math.cos(math.pi * progress)) / 2


@torch.no_grad()
def clip_per_head(parameters: Iterable[nn.Parameter], max_norm: float) -> Tensor:
    """Scale the gradients of each head in place to a norm of at most `max_norm`.

    Parameters are [A, ...]; returns the norms before clipping, [A]. The same arithmetic as
    `torch.nn.utils.clip_grad_norm_` on every head's own parameters.
    """
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    # One row per head: sums down a column would round by the number of other heads.
    norms = torch.stack([gradient.flatten(1).norm(dim=1) for gradient in gradients], dim=1)
    norms = norms.square().sum(1).sqrt()
    scale = (max_norm / (norms + 1e-6)).clamp(max=1.0)
    for gradient in gradients:
        gradient.mul_(scale.view(-1, *[1] * (gradient.dim() - 1)))
    return norms


def average_decay(step: int, *, warmup: int, ema: float) -> float:
    """Decay of the averaged weights after `step` optimiser steps (1-based).

    0 (a plain copy) during warm-up; then (1 + t) / (10 + t) for the t-th step after it, until that
    exceeds `ema`: a short run is not left averaging its first weights.
    """
    after = step - warmup
    return min(ema, (1 + after) / (10 + after)) if after > 0 else 0.0


@torch.no_grad()
def update_average(average: nn.Module, model: nn.Module, decay: float) -> None:
    """Move the weights of `average` towards those of `model`: a <- decay * a + (1 - decay) * m.

    Buffers are copied; a decay of 0 copies everything.
    """
    for mean, value in zip(average.parameters(), model.parameters(), strict=True):
        mean.lerp_(value, 1.0 - decay)
    for copy, buffer in zip(average.buffers(), model.buffers(), strict=True):
        copy.copy_(buffer)
