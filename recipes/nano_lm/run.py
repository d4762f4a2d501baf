"""One training run: model, optimiser, moving average, and their checkpoint.

Kept apart from `train.py` so that a step can be read (and tested) without the command line.
"""

from __future__ import annotations

import math
import os
from pathlib import Path

import torch
from model import nano_config
from phases import Phase
from torch import Tensor
from transformers import Qwen2ForCausalLM

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
        self.model = Qwen2ForCausalLM(nano_config())
        self.body = torch.compile(self.model.model)
        matrices = [p for p in self.model.parameters() if p.ndim > 1]
        vectors = [p for p in self.model.parameters() if p.ndim <= 1]
        self.optimizer = torch.optim.AdamW(
            [
                {"params": matrices, "weight_decay": 0.05},
                {"params": vectors, "weight_decay": 0.0},
            ],
            lr=1e-3,
            betas=(0.9, 0.98),
            fused=True,
        )
        self.average = {name: p.detach().clone() for name, p in self.model.named_parameters()}
        self.step = 0

    def restore(self, path: Path) -> None:
        """Continues from a checkpoint."""
        state = torch.load(path, weights_only=True)
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.average, self.step = state["average"], state["step"]

    def save(self, path: Path) -> None:
        """Writes a checkpoint aside, then moves it into place."""
        aside = path.with_suffix(".partial")
        state = {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "average": self.average,
            "step": self.step,
        }
        torch.save(state, aside)
        os.replace(aside, path)

    def update(self, ids: Tensor, weights: Tensor, rate: float) -> dict[str, float]:
        """One optimiser step on `ids` [sequences, length] with loss weights of the same shape.

        Logits are computed only where something is predicted. Returns the loss in nats and the
        share of right first digits (weight above 1) and of right other answer tokens (weight 1).
        """
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        with torch.autocast("cpu", torch.bfloat16):
            read = self.body(input_ids=ids, use_cache=False)  # type: ignore[no-untyped-call]
            hidden = read.last_hidden_state
            trained = weights[:, 1:] > 0
            logits = self.model.lm_head(hidden[:, :-1][trained])
        targets, weight = ids[:, 1:][trained], weights[:, 1:][trained]
        losses = torch.nn.functional.cross_entropy(logits.float(), targets, reduction="none")
        loss = (losses * weight).sum() / weight.sum()
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), CLIP_NORM)
        self.optimizer.step()
        self.optimizer.zero_grad()
        keep = min(AVERAGING, (self.step + 1) / (self.step + 10))
        with torch.no_grad():
            for name, parameter in self.model.named_parameters():
                self.average[name].lerp_(parameter, 1 - keep)
        self.step += 1
        right = (logits.argmax(-1) == targets).float()
        measured = {"loss": float(loss.detach())}
        for name, which in (("first_digit", weight > 1), ("exact", weight == 1)):
            if which.any():
                measured[name] = float(right[which].mean())
        return measured
