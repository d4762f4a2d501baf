"""Lightning's Trainer as a training needs it.

Ours are: checkpoints that replace one another on their disk (Lightning makes its own in /tmp),
progress, exit codes of signals, and one line about a checkpoint that cannot be continued from.
"""

import logging
import signal
import threading
import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.fabric.plugins.environments.lightning import LightningEnvironment
from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO
from lightning.pytorch.callbacks import LambdaCallback

from kvp.artifacts.files import naming, replacing
from kvp.errors import KvpError, UsageError, first_line
from train.job.prepare import Job


class _WholeFiles(TorchCheckpointIO):
    """Checkpoints that replace one another as a whole."""

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: str | Path, storage_options: object = None
    ) -> None:
        with naming(Path(path)):
            Path(path).parent.mkdir(exist_ok=True)
            with replacing(Path(path)) as stream:
                torch.save(checkpoint, stream)


def fit(module: pl.LightningModule, callback: pl.Callback, job: Job) -> None:
    """Train `module` in place up to the job's last step, from its checkpoint if there is one.

    Of a checkpoint tensors and plain values are read, and no code. Raises UsageError where it is
    not of this run, KeyboardInterrupt on Ctrl-C; SIGTERM ends it by SystemExit(143).
    """
    checkpoint, begun = job.target.start, False

    def begin(trainer: pl.Trainer, _: pl.LightningModule) -> None:
        nonlocal begun
        if checkpoint is not None and not trainer.global_step:
            raise ValueError("it is of no step")
        begun = True

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    environment, on_gpu = LightningEnvironment(), job.device.type == "cuda"
    environment.set_global_rank(0)  # launchers' variables (`--heads auto`) do not make us a rank
    trainer = pl.Trainer(
        accelerator="gpu" if on_gpu else "cpu",
        devices=[job.device.index or 0] if on_gpu else 1,
        plugins=[environment, _WholeFiles()],
        max_steps=job.recipe.steps,
        callbacks=[callback, LambdaCallback(on_train_start=begin)],
        logger=False,  # `ValidationAndCheckpoints` has one
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    # TensorBoard's thread prints what a disk refuses, and raises it where the log is written, too.
    hook = threading.excepthook
    threading.excepthook = lambda raised: None if issubclass(raised[0], OSError) else hook(raised)
    with warnings.catch_warnings():
        # Lightning 2.6 uses a class that torch 2.13 deprecates.
        warnings.filterwarnings("ignore", message=r".*treespec, LeafSpec", category=FutureWarning)
        try:
            trainer.fit(module, ckpt_path=checkpoint, weights_only=True)
        except SystemExit:
            if trainer.received_sigterm:
                raise SystemExit(128 + signal.SIGTERM) from None
            raise KeyboardInterrupt from None  # Lightning answers Ctrl-C by SystemExit
        except Exception as problem:
            if begun or checkpoint is None or isinstance(problem, KvpError | OSError):
                raise
            raise UsageError(
                f"{checkpoint} is damaged or not of this run ({first_line(problem)}); delete it to "
                "start this run again"
            ) from problem
        finally:
            threading.excepthook = hook
