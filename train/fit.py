"""Let Lightning run the steps of a training, with what is done between them (`Between`)."""

from __future__ import annotations

import logging
import signal
import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.fabric.plugins.environments.lightning import LightningEnvironment
from lightning.fabric.plugins.environments.torchelastic import TorchElasticEnvironment
from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO
from lightning.pytorch.callbacks import LambdaCallback
from lightning.pytorch.strategies import DDPStrategy
from torch.utils.tensorboard import SummaryWriter

from kvp.artifacts.files import replacing
from kvp.errors import KvpError, UsageError, first_line
from kvp.progress import Progress
from train.distributed import ALONE, Workers
from train.job import Job
from train.ranker_training import RankerTraining
from train.summary import head_layers
from train.validation import HeldOut

LOG_EVERY = 10
"""Steps between two entries of the log."""
SHOWN_BUDGET = "12.5%"
"""Budget at which TensorBoard shows the attention that is kept."""
_CHARTS = {
    "loss or reward": "train/(loss|reward)$",
    "held-out skill, by layer": "skill_by_layer/.*",
    f"attention kept with {SHOWN_BUDGET} of the cache, by layer": "kept_by_layer/.*",
}
SCREEN = {"training": {title: ["Multiline", [tags]] for title, tags in _CHARTS.items()}}
"""What TensorBoard's page of custom scalars shows."""
_TERMINATED = 128 + signal.SIGTERM
"""Exit code of a program that SIGTERM ended."""


class Between(pl.Callback):
    """What is done after a step when it is due, and after the last one.

    In this order, so that a checkpoint has what a validation changes: validation, TensorBoard,
    progress on standard error, and the one checkpoint, which is replaced as a whole.
    """

    state_key = "Checkpoints"  # its place in checkpoints (docs/formats.md)

    def __init__(self, job: Job, module: RankerTraining) -> None:
        """Validate `module` on the job's held-out contexts, and write to the folder of its run.

        Of several processes the first one logs and shows its progress; its run has the folder's
        name in TensorBoard.
        """
        self._job, self._module, self._target = job, module, job.target
        self._shown = job.workers.first
        self._points = job.validation_points(job.config.validation_contexts) if self._shown else []
        self._source = job.source(job.recipe.label)
        self._layers = head_layers(job.traces.geometry, job.heads)

    def on_train_start(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        """Begin at the step that is resumed from; entries of the log after it are hidden."""
        if self._shown:
            step, logs = trainer.global_step, self._target.logs
            folder = logs / self._target.place.absolute().name
            self._writer = SummaryWriter(folder, purge_step=step + 1)
            self._writer.add_custom_scalars(SCREEN)
            self._progress = Progress("training", int(trainer.max_steps), completed=step)
            self._progress.__enter__()

    def on_train_batch_end(
        self,
        trainer: pl.Trainer,
        module: pl.LightningModule,
        outputs: Any,  # noqa: ANN401
        *_: object,
    ) -> None:
        """Do what is due."""
        config, training = self._job.config, self._module
        step, last = trainer.global_step, trainer.global_step == trainer.max_steps
        held_out = None
        if last or step % config.validate_every == 0:
            held_out = training.validate(map(self._source.context, self._points))
        if self._shown:
            if step % LOG_EVERY == 0:
                rate = trainer.optimizers[0].param_groups[0]["lr"]
                more = {"train/gradient_norm": training.gradient_norms.mean(), "train/lr": rate}
                for name, value in {**outputs["metrics"], **more}.items():
                    self._writer.add_scalar(name, value, step)
            if held_out is not None:
                for name, value in _by_layer(held_out, self._layers).items():
                    self._writer.add_scalar(name, value, step)
            self._progress.update(step, note=training.note(outputs["metrics"]))
        if last or step % config.checkpoint_every == 0:
            trainer.save_checkpoint(self._target.checkpoint)  # the first writes, others wait
            if trainer.is_global_zero:
                self._target.send_checkpoint()

    def on_train_end(self, *_: object) -> None:
        """Close the log and give the terminal back, also after an error."""
        if hasattr(self, "_progress"):
            self._writer.close()
            self._progress.__exit__()

    on_exception = on_train_end  # type: ignore[assignment]

    def state_dict(self) -> dict[str, Any]:
        """Whose a checkpoint is."""
        return {"run": self._target.digest}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Raise ValueError on a checkpoint of another run; earlier versions did not say whose."""
        if state != self.state_dict():
            raise ValueError("it is of another run")


def _by_layer(held_out: HeldOut, layers: list[str]) -> dict[str, torch.Tensor]:
    """Means of a validation over heads, and layer by layer; skill without signal counts as 0."""
    skill, kept = held_out.skill.nan_to_num(0.0).cpu(), 1 - held_out.lost[SHOWN_BUDGET].cpu()
    means = {"held_out/skill": skill.mean(), "held_out/worst_head": skill.min()}
    for layer in dict.fromkeys(layers):
        of_layer = torch.tensor([one == layer for one in layers])
        for name, values in (("skill", skill), ("kept", kept)):
            means[f"{name}_by_layer/{layer.zfill(2)}"] = values[of_layer].mean()
    return means


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
    callback: pl.Callback,
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
        callbacks=[callback, LambdaCallback(on_train_start=begin)],
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
