"""Let Lightning run the steps of a training."""

from __future__ import annotations

import logging
import signal
import warnings
from collections.abc import Sequence
from pathlib import Path

import lightning.pytorch as pl
import torch
from lightning.fabric.plugins.environments.lightning import LightningEnvironment
from lightning.fabric.plugins.environments.torchelastic import TorchElasticEnvironment
from lightning.pytorch.strategies import DDPStrategy
from torch import nn

from kvp.errors import UsageError
from train.distributed import ALONE, Workers

_TERMINATED = 128 + signal.SIGTERM
"""Exit code of a program that SIGTERM ended."""


def fit(
    module: pl.LightningModule,
    callbacks: Sequence[pl.Callback],
    *,
    device: torch.device,
    steps: int,
    workers: Workers = ALONE,
    checkpoint: Path | None = None,
) -> None:
    """Train `module` in place up to step `steps`, from a checkpoint if there is one.

    Raises KeyboardInterrupt on Ctrl-C; SIGTERM ends it by SystemExit(143).
    """
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    on_gpu = device.type == "cuda"
    devices = [device.index or 0] if workers.count == 1 else list(range(workers.count))
    trainer = pl.Trainer(
        accelerator="gpu" if on_gpu else "cpu",
        devices=devices if on_gpu else workers.count,
        strategy="auto" if workers.count == 1 else DDPStrategy(),
        # Other launchers' variables (of a Slurm array, `--heads auto`) do not make us a rank.
        plugins=[LightningEnvironment() if workers.count == 1 else TorchElasticEnvironment()],
        max_steps=steps,
        callbacks=list(callbacks),
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    with warnings.catch_warnings():
        # Lightning 2.6 uses a class that torch 2.13 deprecates.
        warnings.filterwarnings("ignore", message=r".*treespec, LeafSpec", category=FutureWarning)
        try:
            trainer.fit(module, ckpt_path=checkpoint, weights_only=True)
        except SystemExit:
            if trainer.received_sigterm:
                raise SystemExit(_TERMINATED) from None
            raise KeyboardInterrupt from None  # Lightning answers Ctrl-C by SystemExit


def check_finite(best: nn.Module, *, steps: int, lr: float) -> None:
    """Raise UsageError where a training has ended in weights that are no numbers."""
    if not all(bool(weight.isfinite().all()) for weight in best.parameters()):
        raise UsageError(
            f"training diverged: weights are not finite after {steps} steps; lower --lr (now "
            f"{lr:g}), in a new --out"
        )
