"""A training, from contexts to saved weights, in the order in which Lightning calls its parts.

A step: `training_step` scores contexts and computes the loss, Lightning its gradients,
`configure_gradient_clipping` clips them, `optimizer_step` updates the weights and their average.
Then `ValidationAndCheckpoints` validates the average, and writes log, progress and checkpoint.

What a step does depends on the seed, the step and the weights only
(`train.data.compression_points`), never on a generator's state, so a run continued from a
checkpoint computes what it would have computed anyway. The averaged weights and the best averaged
weights of every head are part of the module, hence of every checkpoint.
"""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, suppress
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities.types import OptimizerLRSchedulerConfig
from torch import Tensor
from torch.utils.tensorboard import SummaryWriter

from kvp.artifacts.files import naming
from kvp.errors import UsageError
from kvp.progress import Progress, phase
from kvp.ranking_metrics import has_signal
from kvp.store import SequenceRecord
from policies.ranker import HeadRankers
from train.data.compression_points import drawn_points, noise_seed
from train.data.contexts import ContextSource, RankingContext, StepContexts, score_together
from train.job.fit import fit
from train.job.prepare import Job
from train.job.run_folder import CHECKPOINT
from train.job.summary import CHARTS, means_by_layer, print_start
from train.learning import optim
from train.learning.initial_rankers import random_rankers
from train.learning.losses import Batch, compute_losses, load_objective
from train.learning.validation import HeldOut, validate_rankers
from train.recipe import Recipe

LOG_EVERY = 10
"""Steps between two entries of the log."""


def train_rankers(job: Job) -> RankerTraining:
    """Train the rankers of a job; returns the module after the last step."""
    phase("reading training sequences")
    sequences = job.training_data.training
    rankers = random_rankers(job.recipe, job.traces, sequences, job.heads, job.config.seed)
    print_start(job, rankers)
    module = RankerTraining(
        rankers, job.recipe, job.use_label(job.recipe.label), sequences,
        seed=job.config.seed, activation_bytes=job.config.activation_gb * 1e9,
        heads=job.heads, model_heads=job.traces.geometry.total_kv_heads,
    )  # fmt: skip
    fit(module, ValidationAndCheckpoints(job, module), job)
    return module


class RankerTraining(pl.LightningModule):
    """Train the rankers of all heads at once."""

    best_skill: Tensor
    """[A] float32 best held-out skill so far, -inf before the first validation."""
    best_step: Tensor
    """[A] int64 step at which each head was best."""

    def __init__(
        self, rankers: HeadRankers, recipe: Recipe, source: ContextSource,
        records: Sequence[SequenceRecord], *, seed: int, activation_bytes: float = 8e9,
        heads: range | None = None, model_heads: int | None = None,
    ) -> None:  # fmt: skip
        """Train `rankers` on contexts of `records`, drawn from `source`.

        `activation_bytes` as for `score_together`. `rankers` and `source` are those of the `heads`
        of a model that has `model_heads`, None for all.
        """
        super().__init__()
        self.rankers = rankers
        self.average = copy.deepcopy(rankers).requires_grad_(False)
        self.best = copy.deepcopy(rankers).requires_grad_(False)
        self.register_buffer("best_skill", torch.full((rankers.head_count,), -torch.inf))
        self.register_buffer("best_step", torch.zeros(rankers.head_count, dtype=torch.int64))
        self.gradient_norms = torch.zeros(0)
        """[A] of the latest step, before clipping."""
        self._recipe = recipe
        self._objective = load_objective(recipe.objective)
        self._contexts = StepContexts(
            source,
            lambda step: drawn_points(records, recipe, seed=seed, step=step),
            steps=recipe.steps,
        )
        self._seed = seed
        self._activation_bytes = activation_bytes
        self._heads = slice(None) if heads is None else slice(heads.start, heads.stop)
        self._model_heads = model_heads

    def configure_optimizers(self) -> OptimizerLRSchedulerConfig:
        """AdamW or Muon with the paper's warm-up and cosine, by step."""
        recipe = self._recipe
        lr, decay = recipe.lr, recipe.weight_decay
        optimizer: torch.optim.Optimizer
        if recipe.optimizer == "muon":
            optimizer = optim.Muon(self.rankers, lr=lr, weight_decay=decay)
        else:
            weights = self.rankers.parameters()
            optimizer = torch.optim.AdamW(weights, lr=lr, weight_decay=decay, fused=True)
        final = min(1.0, recipe.final_lr / recipe.lr)
        scheduler = torch.optim.lr_scheduler.LambdaLR(
            optimizer,
            lambda step: optim.learning_rate_factor(
                step, steps=recipe.steps, warmup=recipe.warmup, final_factor=final
            ),
        )
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": scheduler, "interval": "step"},
        }

    def train_dataloader(self) -> Iterator[int]:
        """Step numbers from the current one on; contexts are made from them."""
        return itertools.count(self.global_step)

    def training_step(self, step: int, batch_idx: int) -> dict[str, Any]:
        """Score the contexts of a step: `loss` of the objective, and `metrics`, name -> float."""
        recipe = self._recipe
        contexts = self._contexts.contexts(step)
        counted = torch.stack([has_signal(context.importance) for context in contexts])  # [C, A]
        batch = Batch(
            scores=score_together(self.rankers, contexts, activation_bytes=self._activation_bytes),
            importances=[context.importance for context in contexts],
            counted=counted,
            seeds=[noise_seed(self._seed, step, index) for index in range(recipe.contexts)],
            heads=self._heads,
            model_heads=self._model_heads,
        )
        losses, logged = compute_losses(self._objective, batch, recipe)
        loss, flat = float(losses.detach().mean()), float(1 - counted.float().mean())
        metrics = {**logged, "train/loss": loss, "train/flat_share": flat}
        if not math.isfinite(loss):
            raise UsageError(
                f"training diverged: the loss of step {step + 1} is {loss}; lower --lr (now "
                f"{recipe.lr:g}), or mend an --objective of yours, in a new --out"
            )
        return {"loss": losses.sum(), "metrics": metrics}

    def configure_gradient_clipping(self, *args: object, **kwargs: object) -> None:
        """Clip the gradient of every head separately (Lightning's own clipping stays unset)."""
        self.gradient_norms = optim.clip_per_head(
            self.rankers.parameters(), self._recipe.gradient_clip
        )

    def optimizer_step(self, *args: Any, **kwargs: Any) -> None:  # noqa: ANN401
        """Step, then average."""
        super().optimizer_step(*args, **kwargs)
        decay = optim.average_decay(
            self.global_step, warmup=self._recipe.warmup, ema=self._recipe.ema
        )
        optim.update_average(self.average, self.rankers, decay)

    @torch.no_grad()
    def validate(self, contexts: Iterable[RankingContext]) -> HeldOut:
        """Evaluate the averaged weights on held-out contexts, and keep each head's best.

        A head without signal in every held-out context (NaN) keeps its latest weights.
        """
        held_out = validate_rankers(self.average, contexts)
        better = ~(held_out.skill <= self.best_skill)  # [A] bool
        averages = self.average.parameters()  # [A, ...] each
        for best, average in zip(self.best.parameters(), averages, strict=True):
            best[better] = average[better]
        self.best_skill[better] = held_out.skill[better]
        self.best_step[better] = self.global_step
        return held_out


class ValidationAndCheckpoints(pl.Callback):
    """Validates, logs and writes checkpoints after steps where they are due and after the last one.

    In this order, so that a checkpoint has what a validation changes: Lightning by itself validates
    after it has written a checkpoint, and writes none after the last step.
    """

    state_key = "Checkpoints"  # its place in checkpoints (docs/formats.md)

    def __init__(self, job: Job, module: RankerTraining) -> None:
        """Validate `module` on the job's held-out contexts, and write to the folder of its run."""
        self._job, self._module, self._target = job, module, job.target
        self._points = job.validation_points(job.config.validation_contexts)
        self._opened = ExitStack()

    def on_train_start(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        """Begin at the step that is resumed from; entries of the log after it are hidden."""
        step, name = trainer.global_step, self._target.place.absolute().name
        with naming(self._target.logs):
            self._log = SummaryWriter(str(self._target.logs / name), purge_step=step + 1)
            self._log.add_custom_scalars(CHARTS)
        self._opened.enter_context(naming(self._target.logs))  # what closing the log raises
        self._opened.callback(self._log.close)
        progress = Progress("training", int(trainer.max_steps), completed=step)
        self._progress = self._opened.enter_context(progress)

    def on_train_batch_end(
        self,
        trainer: pl.Trainer,
        module: pl.LightningModule,
        outputs: Any,  # noqa: ANN401
        *_: object,
    ) -> None:
        """Validate, log and write a checkpoint where this step is one of theirs."""
        job, training = self._job, self._module
        step, last = trainer.global_step, trainer.global_step == trainer.max_steps
        metrics, logged = outputs["metrics"], {}
        if step % LOG_EVERY == 0:
            rate = trainer.optimizers[0].param_groups[0]["lr"]
            logged = {"train/gradient_norm": training.gradient_norms.mean(), "train/lr": rate}
            logged |= metrics
        if last or step % job.config.validate_every == 0:
            source = job.use_label(job.recipe.label)
            held_out = training.validate(map(source.context, self._points))
            logged |= means_by_layer(held_out, job.traces.geometry, job.heads)
        with naming(self._target.logs):
            for name, value in logged.items():
                self._log.add_scalar(name, value, step)
        self._progress.update(step, note=self._note(metrics))
        if last or step % job.config.checkpoint_every == 0:
            trainer.save_checkpoint(self._target.checkpoint)
            self._target.send(CHECKPOINT)

    def _note(self, metrics: dict[str, float]) -> str:
        """A step in short: loss or reward, and held-out skill on the label."""
        name = "reward" if "train/reward" in metrics else "loss"
        text, skill = f"{name} {metrics[f'train/{name}']:.3f}", self._module.best_skill
        if torch.isfinite(skill).all():
            text += f", held-out skill on {self._job.recipe.label} {skill.mean():.3f}"
        return text

    def on_train_end(self, *_: object) -> None:
        """Give the terminal back, and close the log."""
        self._opened.close()

    def on_exception(self, *_: object) -> None:
        """Close as at the end; an OSError of the log is dropped, since the run fails already."""
        with suppress(OSError):
            self.on_train_end()

    def state_dict(self) -> dict[str, Any]:
        """The digest of the run, by which a checkpoint is known."""
        return {"run": self._target.digest}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Raise ValueError on a checkpoint of another run."""
        if state != self.state_dict():
            raise ValueError("it is of another run")
