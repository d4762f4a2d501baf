"""Let Lightning run the steps of a training."""

from __future__ import annotations

import logging
import signal
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.fabric.plugins.environments.lightning import LightningEnvironment
from lightning.fabric.plugins.environments.torchelastic import TorchElasticEnvironment
from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO
from lightning.pytorch.callbacks import LambdaCallback
from lightning.pytorch.strategies import DDPStrategy
from torch import nn

from kvp.artifacts.files import replacing
from kvp.errors import KvpError, UsageError, first_line
from train.distributed import ALONE, Workers

_TERMINATED = 128 + signal.SIGTERM
"""Exit code of a program that SIGTERM ended."""


class _WholeFiles(TorchCheckpointIO):
    """Checkpoints that replace one another as a whole; Lightning's own leave files in /tmp."""

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: str | Path, storage_options: object = None
    ) -> None:
        """Write one."""
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        with replacing(Path(path)) as stream:
            torch.save(checkpoint, stream)


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

    Of a checkpoint tensors and plain values are read, and no code. Raises UsageError where it is
    not of this run, KeyboardInterrupt on Ctrl-C; SIGTERM ends it by SystemExit(143).
    """
    begun: list[int] = []

    def begin(trainer: pl.Trainer, _: pl.LightningModule) -> None:
        if checkpoint is not None and not trainer.global_step:
            raise ValueError("it is of no step")
        begun.append(trainer.global_step)

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    on_gpu = device.type == "cuda"
    devices = [device.index or 0] if workers.count == 1 else list(range(workers.count))
    trainer = pl.Trainer(
        accelerator="gpu" if on_gpu else "cpu",
        devices=devices if on_gpu else workers.count,
        strategy="auto" if workers.count == 1 else DDPStrategy(),
        # Other launchers' variables (of a Slurm array, `--heads auto`) do not make us a rank.
        plugins=[
            LightningEnvironment() if workers.count == 1 else TorchElasticEnvironment(),
            _WholeFiles(),
        ],
        max_steps=steps,
        callbacks=[*callbacks, LambdaCallback(on_train_start=begin)],
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
        except Exception as problem:
            if begun or checkpoint is None or isinstance(problem, KvpError | OSError):
                raise
            raise UsageError(
                f"{checkpoint} is damaged or not of this run ({first_line(problem)}); delete it to "
                "start this run again"
            ) from problem


def check_finite(best: nn.Module, *, steps: int, lr: float) -> None:
    """Raise UsageError where a training has ended in weights that are no numbers."""
    if not all(bool(weight.isfinite().all()) for weight in best.parameters()):
        raise UsageError(
            f"training diverged: weights are not finite after {steps} steps; lower --lr (now "
            f"{lr:g}), in a new --out"
        )
