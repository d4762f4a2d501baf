"""Callbacks of a training: validation, checkpoints, TensorBoard, the progress bar.

Order matters: validation changes what a checkpoint must contain, so checkpoints come last.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities.types import STEP_OUTPUT
from torch.utils.tensorboard import SummaryWriter

from kvp.geometry import Geometry
from kvp.progress import Progress
from kvp.ranking import Protection
from train.compression_points import CompressionPoint
from train.contexts import ContextSource
from train.distributed import ALONE, Workers
from train.ranker_training import RankerTraining
from train.run_folder import RunFolder
from train.summary import head_names
from train.validation import HeldOut, evaluate

LOG_EVERY = 10
"""Steps between two entries of the log."""
SHOWN_BUDGET = "12.5%"
"""Budget at which TensorBoard shows the attention that is kept."""
Metrics = Mapping[str, float]
"""Numbers of a step for the log, by name."""


def due(trainer: pl.Trainer, every_steps: int) -> bool:
    """Whether what is done every so many steps, and at the last, is done after this step."""
    return trainer.global_step % every_steps == 0 or trainer.global_step == trainer.max_steps


class Validation(Callback):
    """Evaluate the averaged weights every few steps and at the last; keep each head's best."""

    def __init__(
        self,
        source: ContextSource,
        points: Sequence[CompressionPoint],
        *,
        every_steps: int,
        reward_protection: Protection,
        workers: Workers = ALONE,
    ) -> None:
        """Evaluate at the fixed `points` of `source`; of several processes, the first one does.

        `reward_protection` is what the training reward leaves out.
        """
        self._source = source
        self._points = points
        self._every = every_steps
        self._protection = reward_protection
        self._workers = workers
        self.latest: HeldOut | None = None
        """What the latest validation found, in the process that validates."""

    def on_train_batch_end(
        self, trainer: pl.Trainer, module: pl.LightningModule, *args: object
    ) -> None:
        """Validate when due."""
        if not due(trainer, self._every):
            return
        assert isinstance(module, RankerTraining)
        skill = torch.empty_like(module.best_skill)
        if self._workers.first:
            contexts = map(self._source.context, self._points)
            self.latest = evaluate(module.average, contexts, reward_protection=self._protection)
            skill = self.latest.skill
        module.keep_best(self._workers.from_first(skill))


_CHARTS = {
    "loss or reward": "(train/(loss|reward)|held_out/loss)$",
    "held-out skill, by layer": "skill_by_layer/.*",
    f"attention kept with {SHOWN_BUDGET} of the cache, by layer": "kept_by_layer/.*",
}
SCREEN = {"training": {title: ["Multiline", [tags]] for title, tags in _CHARTS.items()}}
"""What TensorBoard's page of custom scalars shows."""


class Measuring(Protocol):
    """A callback that measures on held-out contexts."""

    latest: HeldOut | None


class Log(Callback):
    """TensorBoard: scalars of steps and of validations, also on one page (`SCREEN`).

    The folder's name is the run's name in TensorBoard.
    """

    def __init__(
        self, target: RunFolder, geometry: Geometry, validation: Measuring, *, heads: range
    ) -> None:
        """Write TensorBoard events to a run's folder, of these `heads` of a model."""
        self._folder = target.logs / target.place.absolute().name
        self._geometry = geometry
        self._heads = heads
        self._validation = validation
        self._writer: SummaryWriter | None = None

    def on_train_start(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        """Open the log; entries after the step that is resumed from are hidden."""
        self._writer = SummaryWriter(self._folder, purge_step=trainer.global_step + 1)
        self._writer.add_custom_scalars(SCREEN)

    def on_train_batch_end(
        self, trainer: pl.Trainer, module: pl.LightningModule, outputs: STEP_OUTPUT, *args: object
    ) -> None:
        """Write scalars and figures when due."""
        assert self._writer is not None
        assert isinstance(outputs, Mapping)
        step = trainer.global_step
        if step % LOG_EVERY == 0:
            for name, value in outputs["metrics"].items():
                self._writer.add_scalar(name, value, step)
            norms: Any = module.gradient_norms
            self._writer.add_scalar("train/gradient_norm", norms.mean(), step)
            self._writer.add_scalar("train/lr", trainer.optimizers[0].param_groups[0]["lr"], step)
        held_out, self._validation.latest = self._validation.latest, None
        if held_out is not None:
            self._write_held_out(held_out, step)

    def on_train_end(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        """Close."""
        assert self._writer is not None
        self._writer.close()

    def _write_held_out(self, held_out: HeldOut, step: int) -> None:
        """Means of a validation over heads, layer by layer; skill without signal counts as 0."""
        assert self._writer is not None
        skill, kept = held_out.skill.nan_to_num(0.0).cpu(), 1 - held_out.lost[SHOWN_BUDGET].cpu()
        self._writer.add_scalar("held_out/skill", skill.mean(), step)
        self._writer.add_scalar("held_out/worst_head", skill.min(), step)
        layers = [name.partition(".")[0] for name in head_names(self._geometry, self._heads)]
        for layer in dict.fromkeys(layers):
            of_layer = torch.tensor([one == layer for one in layers])
            for name, values in (("skill", skill), ("kept", kept)):
                tag = f"{name}_by_layer/{layer.zfill(2)}"
                self._writer.add_scalar(tag, values[of_layer].mean(), step)


def skill_note(label: str) -> Callable[[pl.LightningModule, Metrics], str]:
    """The note of `Bar` for a run that trains on a label: loss or reward, and held-out skill."""

    def note(module: pl.LightningModule, metrics: Metrics) -> str:
        assert isinstance(module, RankerTraining)
        name = "reward" if "train/reward" in metrics else "loss"
        text = f"{name} {metrics[f'train/{name}']:.3f}"
        if torch.isfinite(module.best_skill).all():
            text += f", held-out skill on {label} {module.best_skill.mean():.3f}"
        return text

    return note


class Bar(Callback):
    """Progress on standard error: steps, a note, time left."""

    def __init__(self, title: str, note: Callable[[pl.LightningModule, Metrics], str]) -> None:
        """Start with training; `note` makes the note of a step from the module and its metrics."""
        self._title = title
        self._note = note
        self._progress: Progress | None = None

    def on_train_start(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        """Start at the step that is resumed from."""
        steps, done = int(trainer.max_steps), trainer.global_step
        self._progress = Progress(self._title, steps, completed=done)
        self._progress.__enter__()

    def on_train_batch_end(
        self, trainer: pl.Trainer, module: pl.LightningModule, outputs: STEP_OUTPUT, *args: object
    ) -> None:
        """Move on."""
        assert self._progress is not None
        assert isinstance(outputs, Mapping)
        self._progress.update(trainer.global_step, note=self._note(module, outputs["metrics"]))

    def on_train_end(self, *_: object) -> None:
        """Leave the last state and give the terminal back, also after an error."""
        if self._progress is not None:
            self._progress.__exit__(None, None, None)
            self._progress = None

    on_exception = on_train_end  # type: ignore[assignment]


class Checkpoints(Callback):
    """One checkpoint that is replaced as a whole, so that no moment leaves none or half of one."""

    def __init__(self, target: RunFolder, *, every_steps: int) -> None:
        """Write to the folder of a run."""
        self._target = target
        self._every = every_steps

    def on_train_batch_end(
        self, trainer: pl.Trainer, module: pl.LightningModule, *args: object
    ) -> None:
        """Save when due, and after the last step."""
        if not due(trainer, self._every):
            return
        trainer.save_checkpoint(self._target.checkpoint)  # the first process writes, others wait
        if trainer.is_global_zero:
            self._target.checkpoint_saved()

    def state_dict(self) -> dict[str, Any]:
        """Whose a checkpoint is."""
        return {"run": self._target.digest}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Raise ValueError on a checkpoint of another run; earlier versions did not say whose."""
        if state != self.state_dict():
            raise ValueError("it is of another run")
