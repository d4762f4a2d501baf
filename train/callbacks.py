"""What happens beside the optimiser: validation, checkpoints, TensorBoard, the progress bar.

Order matters: validation changes what a checkpoint must contain, so checkpoints come last.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities.types import STEP_OUTPUT
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from torch.utils.tensorboard import SummaryWriter

from kvp.artifacts.files import naming
from kvp.geometry import Geometry
from kvp.ranking import Protection
from train.data.compression_points import CompressionPoint
from train.data.contexts import ContextSource
from train.distributed import ALONE, Workers
from train.labels import EVALUATED
from train.model.ranker_training import RankerTraining
from train.run_folder import RunFolder
from train.validation import evaluate


class Validation(Callback):
    """Judge the averaged weights every few steps and at the last one; keep each head's best."""

    def __init__(
        self,
        source: ContextSource,
        cuts: Sequence[CompressionPoint],
        *,
        every_steps: int,
        reward_protection: Protection,
        budgets: str = "all",
        ranks: Workers = ALONE,
    ) -> None:
        """Judge on the fixed `cuts` of `source`; of several processes, the first one judges.

        `reward_protection` and `budgets` are what the training reward leaves out and counts.
        """
        self._source = source
        self._cuts = cuts
        self._every = every_steps
        self._protection = reward_protection
        self._budgets = budgets
        self._ranks = ranks
        self.latest_skill: torch.Tensor | None = None
        """[A] skill at the latest validation of this process."""

    def on_train_batch_end(
        self, trainer: pl.Trainer, module: pl.LightningModule, *args: object
    ) -> None:
        """Validate when due."""
        step = trainer.global_step
        if step % self._every and step != trainer.max_steps:
            return
        assert isinstance(module, RankerTraining)
        skill = torch.empty_like(module.best_skill)
        if self._ranks.first:
            contexts = (self._source.context(cut) for cut in self._cuts)
            result = evaluate(
                module.average,
                contexts,
                reward_protection=self._protection,
                budgets=self._budgets,
            )
            skill = result.skill
        self.latest_skill = self._ranks.from_first(skill)
        module.keep_best(self.latest_skill)


class Log(Callback):
    """A few scalars, and the skill of every head as one [layers, KV heads] image."""

    def __init__(
        self,
        folder: Path,
        geometry: Geometry,
        validation: Validation,
        *,
        heads: range,
        every_steps: int,
    ) -> None:
        """Write TensorBoard events to `folder`, of these `heads` of a model."""
        self._folder = folder
        self._geometry = geometry
        self._heads = heads
        self._validation = validation
        self._every = every_steps
        self._writer: SummaryWriter | None = None

    def on_train_start(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        """Open the log; entries after the step that is resumed from are hidden."""
        self._writer = SummaryWriter(self._folder, purge_step=trainer.global_step + 1)

    def on_train_batch_end(
        self, trainer: pl.Trainer, module: pl.LightningModule, outputs: STEP_OUTPUT, *args: object
    ) -> None:
        """Write what is due."""
        assert self._writer is not None
        assert isinstance(outputs, Mapping)
        step = trainer.global_step
        if step % self._every == 0:
            for name, value in outputs["metrics"].items():
                self._writer.add_scalar(name, value, step)
            assert isinstance(module, RankerTraining)
            norm = module.gradient_norms.mean()
            self._writer.add_scalar("train/gradient_norm", norm, step)
            self._writer.add_scalar("train/lr", trainer.optimizers[0].param_groups[0]["lr"], step)
        skill, self._validation.latest_skill = self._validation.latest_skill, None
        if skill is not None:
            known = skill.nan_to_num(0.0).cpu()
            image = torch.zeros(self._geometry.agents)
            image[self._heads.start : self._heads.stop] = known.clamp(0, 1)
            image = image.view(self._geometry.layers, self._geometry.kv_heads)
            self._writer.add_scalar("held_out/skill", known.mean(), step)
            self._writer.add_scalar("held_out/worst_head", known.min(), step)
            self._writer.add_image("held_out/skill_by_head", image, step, dataformats="HW")

    def on_train_end(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        """Flush and close."""
        assert self._writer is not None
        self._writer.close()


class Bar(Callback):
    """Progress on standard error: steps, reward, held-out skill, time left."""

    def __init__(self, label: str) -> None:
        """Make the bar of a run that trains on a label; it starts with training."""
        self._label = label
        self._progress = Progress(
            TextColumn("training"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[state]}"),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=Console(stderr=True),
        )
        self._task = self._progress.add_task("training", total=None, state="")

    def on_train_start(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        """Start at the step that is resumed from."""
        self._progress.update(self._task, total=trainer.max_steps, completed=trainer.global_step)
        self._progress.start()

    def on_train_batch_end(
        self, trainer: pl.Trainer, module: pl.LightningModule, outputs: STEP_OUTPUT, *args: object
    ) -> None:
        """Move on."""
        assert isinstance(module, RankerTraining)
        assert isinstance(outputs, Mapping)
        name = "reward" if "train/reward" in outputs["metrics"] else "loss"
        state = f"{name} {outputs['metrics'][f'train/{name}']:.3f}"
        if torch.isfinite(module.best_skill).all():
            skill = "skill" if self._label == EVALUATED else f"skill on {self._label}"
            state += f", held-out {skill} {module.best_skill.mean():.3f}"
        self._progress.update(self._task, completed=trainer.global_step, state=state)

    def on_train_end(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        """Leave the finished bar."""
        self._progress.stop()

    def on_exception(
        self, trainer: pl.Trainer, module: pl.LightningModule, exception: BaseException
    ) -> None:
        """Give the terminal back."""
        self._progress.stop()


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
        if trainer.global_step % self._every and trainer.global_step != trainer.max_steps:
            return
        self._target.aside.parent.mkdir(parents=True, exist_ok=True)
        with naming(self._target.aside):
            trainer.save_checkpoint(self._target.aside)  # the first one writes, the others wait
        if trainer.is_global_zero:
            self._target.keep(trainer.global_step)
