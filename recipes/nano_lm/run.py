"""One training run: model, optimisers, moving average, and their checkpoint.

Kept apart from `train.py` so that a step can be read (and tested) without the command line.
"""

from __future__ import annotations

import math
import os
from pathlib import Path

import torch
from model import new_model
from optimizer import optimizers
from phases import Phase
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import functional as F

AVERAGING = 0.998
"""Share of the moving average kept at each step."""
CLIP_NORM = 1.0


def learning_rate(phase: Phase, step: int) -> float:
    """Learning rate at `step` of `phase`: linear warm-up, then a cosine to `final_lr`."""
    if step < phase.warmup:
        return phase.lr * (step + 1) / phase.warmup
    turn = (step - phase.warmup) / max(1, phase.steps - phase.warmup)
    return phase.final_lr + (phase.lr - phase.final_lr) * 0.5 * (1 + math.cos(math.pi * turn))


class Run:
    """A model in training; `step` counts the batches it has seen."""

    def __init__(self) -> None:
        self.model = new_model()
        self.optimizers = optimizers(self.model)
        self.average = {name: p.detach().clone() for name, p in self.model.named_parameters()}
        self.step = 0

    def start_from(self, weights: Path) -> None:
        """Begins with the weights of an exported `model.safetensors`."""
        self.model.load_state_dict(
            {name: tensor.float() for name, tensor in load_file(weights).items()}, strict=False
        )
        self.average = {name: p.detach().clone() for name, p in self.model.named_parameters()}

    def restore(self, path: Path) -> None:
        """Continues from a checkpoint."""
        state = torch.load(path, weights_only=True)
        self.model.load_state_dict(state["model"])
        for optimizer, kept in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(kept)
        self.average, self.step = state["average"], state["step"]

    def save(self, path: Path) -> None:
        """Writes a checkpoint aside, then moves it into place."""
        aside = path.with_suffix(".partial")
        state = {
            "model": self.model.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
            "average": self.average,
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
        keep = min(AVERAGING, (self.step + 1) / (self.step + 10))
        with torch.no_grad():
            for name, parameter in self.model.named_parameters():
                self.average[name].lerp_(parameter, 1 - keep)
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
