"""Build the module of a job, and let Lightning run its steps."""

from __future__ import annotations

import logging
import signal
import warnings
from collections.abc import Sequence
from pathlib import Path

import lightning.pytorch as pl
import torch
from lightning.fabric.plugins.environments.lightning import LightningEnvironment
from lightning.pytorch.strategies import DDPStrategy

from policies.ranker import HeadRankers
from train.distributed import ALONE, Workers
from train.job import Job
from train.memory import freed_memory_kept
from train.model.ranker_training import RankerTraining

_TERMINATED = 128 + signal.SIGTERM
"""Exit code of a program that SIGTERM ended."""


def new_training(job: Job, rankers: HeadRankers) -> RankerTraining:
    """The module that trains `rankers` on the job's training data."""
    config = job.config
    return RankerTraining(
        rankers,
        job.recipe,
        job.source(job.recipe.label),
        job.training_data.training,
        seed=config.seed,
        activation_bytes=config.activation_gb * 1e9,
        stacked=config.stacked,
        heads=job.heads,
        model_heads=job.traces.geometry.total_kv_heads,
        workers=job.workers,
    )


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
        plugins=[LightningEnvironment()],  # whatever launched us: ranks are `workers`' affair
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
