"""One training run: model, optimisers, and their checkpoint.

Kept apart from `train.py` so that a step can be read (and tested) without the command line.
"""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Any

import torch
from model import new_model
from phases import Phase
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import functional as F

CLIP_NORM = 1.0
WEIGHT_DECAY = 0.05


def learning_rate(phase: Phase, step: int) -> float:
    """Learning rate at `step` of `phase`: linear warm-up, then a cosine to `final_lr`."""
    if step < phase.warmup:
        return phase.lr * (step + 1) / phase.warmup
    turn = (step - phase.warmup) / max(1, phase.steps - phase.warmup)
    return phase.final_lr + (phase.lr - phase.final_lr) * 0.5 * (1 + math.cos(math.pi * turn))


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


class Run:
    """A model in training; `step` counts the batches it has seen."""

    def __init__(self) -> None:
        self.model = new_model()
        self.optimizers = optimizers(self.model)
        self.step = 0

    def start_from(self, weights: Path) -> None:
        """Begins with the weights of an exported `model.safetensors`."""
        self.model.load_state_dict(
            {name: tensor.float() for name, tensor in load_file(weights).items()}, strict=False
        )

    def restore(self, path: Path) -> None:
        """Continues from a checkpoint."""
        state = torch.load(path, weights_only=True)
        self.model.load_state_dict(state["model"])
        for optimizer, kept in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(kept)
        self.step = state["step"]

    def save(self, path: Path) -> None:
        """Writes a checkpoint aside, then moves it into place."""
        aside = path.with_suffix(".partial")
        state = {
            "model": self.model.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
            "step": self.step,
        }
        torch.save(state, aside)
        os.replace(aside, path)

    def update(
        self, ids: Tensor, weights: Tensor, positions: Tensor, rate: float
    ) -> dict[str, float]:
        """One optimiser step; `ids`, loss weights and positions are [sequences, length].

        Logits are computed only where something is predicted. Returns the loss in nats, the share
        of right first tokens of values (weight above 1) and of other answer tokens (weight 1), and
        the loss of running text (weight below 1).
        """
        trained = weights[:, 1:] > 0
        targets, weight = ids[:, 1:][trained], weights[:, 1:][trained]
        with torch.autocast("cpu", torch.bfloat16):
            # The mask keeps transformers from reading gaps between positions as packed sequences.
            hidden = self.model.model(
                input_ids=ids, attention_mask=torch.ones_like(ids), position_ids=positions
            ).last_hidden_state
            logits = self.model.lm_head(hidden[:, :-1][trained]).float()
        losses = F.cross_entropy(logits, targets, reduction="none")
        right = logits.argmax(-1) == targets
        loss = (losses * weight).sum() / weight.sum()
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), CLIP_NORM)
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = rate
            optimizer.step()
            optimizer.zero_grad()
        self.step += 1
        measured = {"loss": float(loss.detach())}
        for name, which, what in (
            ("first", weight > 1, right.float()),
            ("exact", weight == 1, right.float()),
            ("text", weight < 1, losses.detach()),
        ):
            if which.any():
                measured[name] = float(what[which].mean())
        return measured
