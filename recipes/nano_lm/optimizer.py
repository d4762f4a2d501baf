"""Muon for the matrices of the model's layers, AdamW for the embedding, biases and norms."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

WEIGHT_DECAY = 0.05


def optimizers(model: torch.nn.Module) -> list[torch.optim.Optimizer]:
    """The two optimisers of a model, to be given their learning rate at each step.

    Muon's updates are scaled to AdamW's root mean square (Liu and others, 2025, "Muon is scalable
    for LLM training"), so that one rate serves both.
    """
    matrices: list[Tensor] = []
    table: list[Tensor] = []
    vectors: list[Tensor] = []
    for name, parameter in model.named_parameters():
        chosen = vectors if parameter.ndim < 2 else table if "embed" in name else matrices
        chosen.append(parameter)
    others: list[dict[str, Any]] = [
        {"params": table, "weight_decay": WEIGHT_DECAY},
        {"params": vectors, "weight_decay": 0.0},
    ]
    return [
        torch.optim.Muon(matrices, weight_decay=WEIGHT_DECAY, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(others, lr=1e-3, betas=(0.9, 0.98), fused=True),
    ]
