"""The LightningModule: one step scores contexts, computes the loss and updates the weights.

What a step does depends on the seed, the step and the weights only
(`train.compression_points`), never on a generator's state, so a run continued from a
checkpoint computes what it would have computed anyway. The averaged weights and the best averaged
weights of every head are part of the module, hence of every checkpoint.
"""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities.types import OptimizerLRSchedulerConfig
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from kvp.errors import UsageError
from kvp.metrics import has_signal
from kvp.store import SequenceRecord
from policies.ranker import HeadRankers, bytes_per_token
from train.compression_points import drawn_points, noise_seed, protection_of
from train.contexts import ContextSource, RankingContext, StepContexts
from train.distributed import ALONE, Workers
from train.losses import Batch, losses_of, mean_of_counted, objective_of, top_entropy
from train.optim import Muon, average_decay, clip_per_head, learning_rate_factor, update_average
from train.recipe import Recipe
from train.validation import HeldOut, evaluate


class RankerTraining(pl.LightningModule):
    """Train the rankers of all heads at once."""

    best_skill: Tensor
    """[A] float32 best held-out skill so far, -inf before the first validation."""
    best_step: Tensor
    """[A] int64 step at which each head was best."""

    def __init__(
        self,
        rankers: HeadRankers,
        recipe: Recipe,
        source: ContextSource,
        records: Sequence[SequenceRecord],
        *,
        seed: int,
        activation_bytes: float = 8e9,
        stacked: bool | None = None,
        heads: range | None = None,
        model_heads: int | None = None,
        workers: Workers = ALONE,
    ) -> None:
        """Train `rankers` on contexts of `records`, drawn from `source`.

        Where the activations of all heads need more than `activation_bytes`, they are computed
        again in the backward pass, in groups of heads; `stacked` as for `HeadRankers.forward`.
        `rankers` and `source` are those of the `heads` of a model that has `model_heads`, None for
        all; `workers` share a step's contexts.
        """
        super().__init__()
        self.rankers = rankers
        self.average = copy.deepcopy(rankers).requires_grad_(False)
        self.best = copy.deepcopy(rankers).requires_grad_(False)
        self.register_buffer("best_skill", torch.full((rankers.total_kv_heads,), -torch.inf))
        self.register_buffer("best_step", torch.zeros(rankers.total_kv_heads, dtype=torch.int64))
        self.gradient_norms = torch.zeros(0)
        """[A] of the latest step, before clipping."""
        self._recipe = recipe
        self._objective = objective_of(recipe.objective)
        self._contexts = StepContexts(
            source,
            lambda step: drawn_points(
                records, recipe, seed=seed, step=step, slots=workers.share(range(recipe.contexts))
            ),
            steps=recipe.steps,
        )
        self._seed = seed
        self._activation_bytes = activation_bytes
        self._stacked = stacked
        self._heads = slice(None) if heads is None else slice(heads.start, heads.stop)
        self._model_heads = model_heads
        self._workers = workers
        self._protection = protection_of(recipe)

    def train_dataloader(self) -> Iterator[int]:
        """Step numbers from the current one on; contexts are made from them."""
        return itertools.count(self.global_step)

    def training_step(self, step: int, batch_idx: int) -> dict[str, Any]:
        """Score the contexts of a step and return the loss of the recipe's objective.

        Next to `loss` the result holds `metrics`, name -> float, for the log. Where processes share
        the step, metrics are means over them by their numbers of contexts, and `loss` is this
        process's share times their number, because DDP takes the mean of the gradients.
        """
        recipe, workers = self._recipe, self._workers
        whole = self._contexts.contexts(step)
        free = [self._protection.competing(context.length) for context in whole]
        scores = [  # C times [A, N]
            score[:, kept] for score, kept in zip(self._scores(whole), free, strict=True)
        ]
        contexts = [context.drop_protected(self._protection) for context in whole]
        counted = torch.stack([has_signal(context.importance) for context in contexts])  # [C, A]
        seeds = [
            noise_seed(self._seed, step, index) for index in workers.share(range(recipe.contexts))
        ]
        batch = Batch(
            scores=scores,
            importances=[context.importance for context in contexts],
            counted=counted,
            seeds=seeds,
            heads=self._heads,
            model_heads=self._model_heads,
            across=workers.sum,
        )
        losses, logged = losses_of(self._objective, batch, recipe)
        entropy = torch.stack([top_entropy(score.detach()) for score in scores])  # [C, A]
        share = len(contexts) / recipe.contexts
        metrics = {
            "train/loss": float(losses.detach().mean()) / share,
            "train/entropy": float(mean_of_counted(entropy, counted)),
            "train/flat_share": float(1 - counted.float().mean()),
            **logged,
        }
        metrics = workers.weighted_sum(metrics, share)
        if not math.isfinite(metrics["train/loss"]):
            raise UsageError(
                f"training diverged: the loss of step {step + 1} is {metrics['train/loss']}; lower "
                f"--lr (now {recipe.lr:g}), in a new --out"
            )
        return {"loss": losses.sum() * workers.count, "metrics": metrics}

    def configure_optimizers(self) -> OptimizerLRSchedulerConfig:
        """AdamW or Muon with the paper's warm-up and cosine, by step."""
        recipe = self._recipe
        lr, decay = recipe.lr, recipe.weight_decay
        optimizer: torch.optim.Optimizer
        if recipe.optimizer == "muon":
            optimizer = Muon(self.rankers, lr=lr, weight_decay=decay)
        else:
            weights = self.rankers.parameters()
            optimizer = torch.optim.AdamW(weights, lr=lr, weight_decay=decay, fused=True)
        final = min(1.0, recipe.final_lr / recipe.lr)
        scheduler = torch.optim.lr_scheduler.LambdaLR(
            optimizer,
            lambda step: learning_rate_factor(
                step, steps=recipe.steps, warmup=recipe.warmup, final_factor=final
            ),
        )
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": scheduler, "interval": "step"},
        }

    def configure_gradient_clipping(self, *args: object, **kwargs: object) -> None:
        """Clip the gradient of every head separately (Lightning's own clipping stays unset)."""
        self.gradient_norms = clip_per_head(self.rankers.parameters(), self._recipe.gradient_clip)

    def optimizer_step(self, *args: Any, **kwargs: Any) -> None:  # noqa: ANN401
        """Step, then average."""
        super().optimizer_step(*args, **kwargs)
        decay = average_decay(self.global_step, warmup=self._recipe.warmup, ema=self._recipe.ema)
        update_average(self.average, self.rankers, decay)

    def validate(self, contexts: Iterable[RankingContext]) -> HeldOut | None:
        """Evaluate the averaged weights on held-out contexts, and keep each head's best.

        Of several processes the first one does, and returns what it found.
        """
        found, skill = None, torch.empty_like(self.best_skill)
        if self._workers.first:
            found = evaluate(self.average, contexts, reward_protection=self._protection)
            skill = found.skill
        self.keep_best(self._workers.from_first(skill))
        return found

    def note(self, metrics: Mapping[str, float]) -> str:
        """A step in short: loss or reward, and held-out skill on the label."""
        name = "reward" if "train/reward" in metrics else "loss"
        text = f"{name} {metrics[f'train/{name}']:.3f}"
        if torch.isfinite(self.best_skill).all():
            text += f", held-out skill on {self._recipe.label} {self.best_skill.mean():.3f}"
        return text

    @torch.no_grad()
    def keep_best(self, skill: Tensor) -> None:
        """Remember the averaged weights of heads whose held-out skill [A] is their best so far.

        A head without signal in every held-out context (NaN) keeps its latest weights.
        """
        better = ~(skill <= self.best_skill)  # [A] bool
        averages = self.average.parameters()  # [A, ...] each
        for best, average in zip(self.best.parameters(), averages, strict=True):
            best[better] = average[better]
        self.best_skill[better] = skill[better]
        self.best_step[better] = self.global_step

    def _scores(self, contexts: Sequence[RankingContext]) -> list[Tensor]:
        """Scores [A, N] of every context, from one pass over their concatenation."""
        tokens = [context.keys.shape[1] for context in contexts]
        lengths = torch.tensor([context.length for context in contexts], device=self.device)
        keys = torch.cat([context.keys for context in contexts], dim=1)  # [A, sum of N, D]
        values = torch.cat([context.values for context in contexts], dim=1)  # [A, sum of N, D]
        positions = torch.cat([context.positions for context in contexts])  # [sum of N]
        length = lengths.repeat_interleave(torch.tensor(tokens, device=self.device))  # [sum of N]
        read = [context.recent for context in contexts if context.recent is not None]
        recent = torch.cat(read, dim=1) if read else None  # [A, sum of N, features]
        count = self.rankers.total_kv_heads
        size = int(self._activation_bytes // (sum(tokens) * bytes_per_token(self.rankers.spec)))
        if size >= count:
            scores = self.rankers(
                keys, values, positions, length, recent, stacked=self._stacked, contexts=tokens
            )
        else:
            groups = [slice(i, i + max(size, 1)) for i in range(0, count, max(size, 1))]
            parts = []
            for h in groups:
                last = None if recent is None else recent[h]
                inputs = keys[h], values[h], positions, length, last
                parts.append(self._recompute(h, tokens, *inputs))
            scores = torch.cat(parts)  # [A, sum of N]
        return list(torch.split(scores, tokens, dim=1))

    def _recompute(self, heads: slice, contexts: Sequence[int], *inputs: Tensor | None) -> Tensor:
        """Scores of some heads, whose activations are computed again in the backward pass."""
        scores: Tensor = checkpoint(
            self.rankers,
            *inputs,
            heads=heads,
            contexts=contexts,
            stacked=self._stacked,
            use_reentrant=False,
            preserve_rng_state=False,
        )
        return scores
