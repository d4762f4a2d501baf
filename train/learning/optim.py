"""Optimiser arithmetic of independent heads that train in one job: Muon, schedules, clipping.

Every parameter of the rankers has the head as its first axis. A global gradient norm would let one
head's outlier shrink every other head's step, so norms are per head.

Muon (Jordan and others, 2024; scaled as in Liu and others, 2025, "Muon is scalable for LLM
training") steps along the momentum's orthogonal part, so that every direction of a matrix learns at
the same pace. `torch.optim.Muon` takes single matrices in bfloat16; here the matrices of all heads
are [A, in, out], each orthogonalised on its own, in one batch of products and in their own dtype.
"""

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

WARMUP_START = 0.01
"""Learning rate of the first step as a fraction of the peak (KVP paper, appendix A.2)."""
_MOMENTUM = 0.9
_QUINTIC = (3.4445, -4.7750, 2.0315)
"""Coefficients of a step of Newton and Schulz, from Jordan's description."""
_ITERATIONS = 5
_UPDATE_RMS = 0.2
"""Root mean square of an update over the learning rate: about AdamW's, so that one rate serves both
(Liu and others, 2025, section 2.2)."""


class Muon(torch.optim.Optimizer):
    """Muon for the matrices of a model of independent heads, AdamW for its other parameters."""

    def __init__(self, model: nn.Module, *, lr: float, weight_decay: float) -> None:
        """Train the parameters of `model`; `weight_decay` is decoupled, as AdamW's."""
        named = list(model.named_parameters())
        matrices, others = (
            [weight for name, weight in named if is_matrix(name, weight) == wanted]
            for wanted in (True, False)
        )
        self._adamw = torch.optim.AdamW(others, lr, weight_decay=weight_decay, fused=True)
        super().__init__([{"params": matrices}, {"params": others}], self._adamw.defaults)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> Any:  # noqa: ANN401 - as torch
        """Take one step; `closure`, if given, computes the loss and its gradients first."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        matrices, others = self.param_groups
        for weight in matrices["params"]:
            state = self.state[weight]
            if not state:
                state["momentum"] = torch.zeros_like(weight)
            momentum = state["momentum"]
            momentum.lerp_(weight.grad, 1 - _MOMENTUM)
            update = orthogonalise_matrices(weight.grad.lerp(momentum, _MOMENTUM))
            scale = _UPDATE_RMS * max(weight.shape[1:]) ** 0.5
            weight.mul_(1 - matrices["lr"] * matrices["weight_decay"])
            weight.add_(update, alpha=-matrices["lr"] * scale)
        self._adamw.state, self._adamw.param_groups = self.state, [others]  # checkpoints have ours
        self._adamw.step()
        return loss


def is_matrix(name: str, weight: Tensor) -> bool:
    """Whether a parameter of a ranker is a stack of matrices that map vectors to vectors.

    Not tables of positions, whose rows are looked up, the last layer (one output), and vectors.
    """
    return name.endswith("_weight") and weight.dim() == 3 and weight.shape[2] > 1


def orthogonalise_matrices(matrices: Tensor) -> Tensor:
    """About the nearest matrices with orthonormal rows or columns: float [A, m, n] -> [A, m, n].

    Five steps of Newton and Schulz on each; the singular values end between 0.6 and 1.2, which is
    as good for training as exactly 1. A matrix of zeros stays one.
    """
    wide = matrices.shape[1] <= matrices.shape[2]
    result = matrices if wide else matrices.transpose(1, 2)
    norms = result.flatten(1).norm(dim=1).clamp_min(torch.finfo(result.dtype).tiny)
    result = result / norms[:, None, None]
    first, third, fifth = _QUINTIC
    for _ in range(_ITERATIONS):
        gram = result @ result.transpose(1, 2)
        factor = torch.baddbmm(gram, gram, gram, beta=third, alpha=fifth)
        result = torch.baddbmm(result, factor, result, beta=first)
    return result if wide else result.transpose(1, 2)


def learning_rate_factor(step: int, *, steps: int, warmup: int, final_factor: float) -> float:
    """Learning rate of one step (0-based) over the peak: linear warm-up, then cosine.

    From `WARMUP_START` at step 0 to 1 at step `warmup`, then to `final_factor` at step `steps`.
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
    """Move the weights of `average` towards those of `model`, by 1 - decay; buffers are copied."""
    for mean, value in zip(average.parameters(), model.parameters(), strict=True):
        mean.lerp_(value, 1.0 - decay)
    for copy, buffer in zip(average.buffers(), model.buffers(), strict=True):
        copy.copy_(buffer)
