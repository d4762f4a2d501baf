"""Which tokens a budget keeps, softly for training and hard for validation; all heads compete."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

_HALVINGS = 50


def soft_log_gates(scores: Tensor, kept: int, width: float) -> Tensor:
    """Logarithms of gates sigmoid((s - t) / width) that sum to `kept`: [A, N] -> [A, N].

    The threshold t is found by bisection. Gradients take its change along: a score that rises
    lowers the gates of all others.
    """
    with torch.no_grad():
        flat = scores.double()
        low, high = flat.min() - 40 * width, flat.max() + 40 * width
        for _ in range(_HALVINGS):
            middle = (low + high) / 2
            more = ((flat - middle) / width).sigmoid().sum() > kept
            low, high = torch.where(more, middle, low), torch.where(more, high, middle)
        threshold = ((low + high) / 2).to(scores.dtype)
    gates = ((scores - threshold) / width).sigmoid()
    slope = (gates * (1 - gates) / width).sum().detach()
    change = (gates - gates.detach()).sum() / slope.clamp_min(torch.finfo(slope.dtype).tiny)
    return F.logsigmoid((scores - threshold - change) / width)


def hard_log_gates(scores: Tensor, kept: int) -> Tensor:
    """0 for the `kept` best tokens of all heads and each head's best one, -inf for the others."""
    gates = torch.full_like(scores, -torch.inf)
    gates.view(-1)[scores.flatten().topk(kept).indices] = 0.0
    return gates.scatter(-1, scores.argmax(-1, keepdim=True), 0.0)
