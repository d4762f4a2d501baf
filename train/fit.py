"""Let Lightning run the steps of a training."""

from __future__ import annotations

import ctypes
import logging
import signal
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
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
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
"""Parameters of mallopt (malloc.h)."""


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
    with warnings.catch_warnings(), freed_memory_kept():
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


@contextmanager
def freed_memory_kept() -> Iterator[None]:
    """Let the process keep what is freed inside the block; what is left goes back at its end.

    A step on a CPU allocates the activations of all heads and frees them again: some hundred
    megabytes, which glibc maps and unmaps one by one. Touching new pages then takes up to a quarter
    of a step (docs/results/speed.md). With other C libraries this does nothing.
    """
    libc = ctypes.CDLL(None)
    if not (hasattr(libc, "mallopt") and hasattr(libc, "malloc_trim")):
        yield
        return
    libc.mallopt(_MMAP_THRESHOLD, 2**30)  # bytes; larger blocks are mapped one by one as before
    libc.mallopt(_TRIM_THRESHOLD, -1)  # never
    try:
        yield
    finally:
        for parameter in (_MMAP_THRESHOLD, _TRIM_THRESHOLD):
            libc.mallopt(parameter, 128 * 1024)  # what both are at the start of a program
        libc.malloc_trim(0)
