"""The LightningModule: rankers, and a scale and an offset per head, that keep the replies.

Scores of all heads compete for one budget, as with `+global`, or become one ranking of tokens for
all heads, as with `+shared`. A step draws contexts and budgets, keeps tokens softly
(`soft_log_gates`), and lowers the divergence of what the model predicts (`Replies`). Everything
drawn is a function of seed and step.
"""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
import torch.nn.functional as F
from lightning.pytorch.utilities.types import OptimizerLRSchedulerConfig
from torch import Tensor, nn
from transformers import PreTrainedModel

from kvp.budgets import parse_budget_range, parse_budgets
from kvp.errors import UsageError
from kvp.geometry import Geometry
from kvp.hf import observe
from kvp.hf.cache_layers import other_layers
from kvp.hf.extra_passes import gated_logits
from kvp.ranking import pooled_scores
from kvp.store import SequenceRecord
from kvp.store.schema import reply_windows
from policies.allocators.shared import Shared
from policies.learned import Calibration
from policies.ranker import HeadRankers
from train.compression_points import CompressionPoint, drawn_points, protection_of
from train.config import DistillationSettings
from train.contexts import Context, ContextSource, scores_of
from train.optim import scheduled
from train.recipe import Recipe

HEAD_RATE = 20.0
"""Learning rate of scales and offsets over that of the rankers."""
GATE_WIDTH, FINAL_GATE_WIDTH = 0.5, 0.05
"""Width of the soft threshold between kept and evicted tokens at the first and the last step, in
units of the calibrated scores (nats); it falls geometrically."""
LOSS_BUDGETS = parse_budgets("6.25%,12.5%")
"""Budgets of the held-out loss."""
_LONGEST_GRADIENT = 1.0
_HALVINGS = 50
_BUDGETS = 7
"""Keeps the draws of budgets apart from those of points (`train.compression_points`)."""


@dataclass(frozen=True, kw_only=True)
class Replies:
    """The model whose predictions are to stay what they are."""

    model: PreTrainedModel
    geometry: Geometry
    hard_targets: float = 0.0
    """Weight of the replies' own tokens, 0 to 1."""

    def losses(
        self,
        context: Context,
        record: SequenceRecord,
        point: CompressionPoint,
        log_gates: Iterable[Tensor],
    ) -> Tensor:
        """What gates change, mean over the tokens of the replies: [gates], nats.

        (1 - w) KL(full cache || gated cache) + w (log p_full - log p_gated)(the reply's token),
        where w is `hard_targets`. `log_gates` [A, N] of the tokens of `context`, which lies on the
        model's device.
        """
        windows = reply_windows(record.reply_spans, point.prefix_length, point.stop)
        rows = torch.cat([torch.arange(*window) for window in windows]) - point.prefix_length
        others: Mapping[int, Any] = {}  # caches that traces do not hold: nothing is evicted there
        if other_layers(self.model.config):
            ids = torch.tensor(
                [record.token_ids[: point.prefix_length]], device=context.keys.device
            )
            others = observe(self.model, ids, queries=0).others
        with torch.no_grad():
            full = self._log_probabilities(context, record, point, rows, None, others)
        following = torch.tensor(record.token_ids[point.prefix_length + 1 :], device=full.device)
        written = rows.to(full.device)
        written = written[written < len(following)]
        losses = []
        for one in log_gates:
            change = full - self._log_probabilities(context, record, point, rows, one, others)
            loss = (1 - self.hard_targets) * (full.exp() * change).sum(-1).mean()
            if self.hard_targets:
                tokens = following[written][:, None]
                excess = change[: len(written)].gather(-1, tokens).sum() / max(len(written), 1)
                loss = loss + self.hard_targets * excess
            losses.append(loss)
        return torch.stack(losses)

    def _log_probabilities(
        self,
        context: Context,
        record: SequenceRecord,
        point: CompressionPoint,
        rows: Tensor,
        log_gates: Tensor | None,
        others: Mapping[int, Any],
    ) -> Tensor:
        layers = self.geometry.layers
        device, dtype = context.keys.device, self.model.dtype
        following = record.token_ids[point.prefix_length : point.stop]
        logits = gated_logits(
            self.model,
            _by_layer(context.keys, layers).to(dtype),
            _by_layer(context.values, layers).to(dtype),
            torch.tensor(following, device=device),
            None if log_gates is None else _by_layer(log_gates, layers),
            others,
        )
        return logits[rows.to(device)].float().log_softmax(-1)


def _by_layer(tensor: Tensor, layers: int) -> Tensor:
    """[A, ...] -> [L, H, ...]."""
    return tensor.view(layers, -1, *tensor.shape[1:])


class Policy(nn.Module):
    """What is trained: the rankers, and a scale and an offset of every head's calibrated scores."""

    def __init__(self, rankers: HeadRankers, calibration: Calibration) -> None:
        """Start where `calibration` is."""
        super().__init__()
        self.rankers = rankers
        self.log_scale = nn.Parameter(torch.zeros(rankers.total_kv_heads))
        self.offset = nn.Parameter(torch.zeros(rankers.total_kv_heads))
        self._calibration = calibration

    def scores(self, context: Context) -> Tensor:
        """Scores of every token that all heads share: [A, N]."""
        calibrated = self._calibration.apply(scores_of(self.rankers, context))
        return calibrated * self.log_scale.exp()[:, None] + self.offset[:, None]

    def calibration(self) -> Calibration:
        """The calibration that gives these scores."""
        scale, offset = self.log_scale.detach().exp().cpu(), self.offset.detach().cpu()
        values = self._calibration.values * scale[:, None] + offset[:, None]
        return Calibration(target="distilled", scores=self._calibration.scores, values=values)


class Distillation(pl.LightningModule):
    """Fine-tune a policy on the model's predictions."""

    first_loss: Tensor
    """Float32 scalar, held-out loss before the first step."""
    best_loss: Tensor
    """Float32 scalar, least held-out loss so far."""
    best_step: Tensor
    """Int64 scalar, the step that it is from."""

    def __init__(
        self,
        policy: Policy,
        replies: Replies,
        source: ContextSource,
        records: Sequence[SequenceRecord],
        settings: DistillationSettings,
        recipe: Recipe,
        *,
        seed: int,
    ) -> None:
        """Train `policy` in place on contexts of `records`, drawn from `source`.

        `recipe` says which compression points are drawn, and whether protected tokens compete.
        """
        super().__init__()
        self.policy = policy
        self.best = copy.deepcopy(policy).requires_grad_(False)
        self.register_buffer("first_loss", torch.tensor(torch.inf))
        self.register_buffer("best_loss", torch.tensor(torch.inf))
        self.register_buffer("best_step", torch.tensor(0))
        self._replies = replies
        self._source, self._records = source, records
        self._settings, self._recipe = settings, recipe
        self._protection = protection_of(recipe)
        self._seed = seed
        self.held_out: dict[str, float] = {}
        """The latest held-out loss, for the log."""
        self.gradient_norms = torch.tensor(0.0)

    def train_dataloader(self) -> Iterator[int]:
        """Step numbers from the current one on."""
        return itertools.count(self.global_step)

    def training_step(self, step: int, batch_idx: int) -> dict[str, Any]:
        """Mean loss of the step's contexts, each at a budget of its own."""
        settings = self._settings
        progress = step / max(settings.steps - 1, 1)
        width = GATE_WIDTH * (FINAL_GATE_WIDTH / GATE_WIDTH) ** progress
        random = np.random.default_rng((self._seed, _BUDGETS, step))
        losses = []
        for point in drawn_points(self._records, self._recipe, seed=self._seed, step=step):
            context = self._source.context(point)
            low, high = (
                budget.tokens(context.length)
                for budget in parse_budget_range(settings.budget_range)
            )
            budget = math.exp(random.uniform(math.log(low), math.log(high)))
            losses.append(self._losses(context, point, [budget], width))
        loss = torch.cat(losses).mean()
        if not bool(loss.isfinite()):
            raise UsageError(
                f"training diverged: the loss of step {step + 1} is {float(loss)}; lower --lr "
                f"(now {settings.lr:g}), in a new --out"
            )
        return {"loss": loss, "metrics": {"train/loss": float(loss.detach()), **self.held_out}}

    @torch.no_grad()
    def held_out_loss(self, points: Sequence[CompressionPoint]) -> Tensor:
        """Mean loss at `points`, with `LOSS_BUDGETS` evicted as evaluation does it."""
        losses = []
        for point in points:
            context = self._source.context(point)
            budgets = [budget.tokens(context.length) for budget in LOSS_BUDGETS]
            losses.append(self._losses(context, point, budgets, None))
        return torch.cat(losses).mean()

    def begin(self, loss: Tensor) -> None:
        """Remember the held-out loss, and the policy, before the first step."""
        self.first_loss.copy_(loss)
        self.keep_best(loss)

    def note(self, metrics: Mapping[str, float]) -> str:
        """A step in short: its loss, and the least held-out one."""
        return f"loss {metrics['train/loss']:.4f}, held out {self.best_loss:.4f}"

    def keep_best(self, loss: Tensor) -> None:
        """Remember the policy if its held-out loss is the least so far."""
        self.held_out = {"held_out/loss": float(loss)}
        if bool(loss < self.best_loss):
            self.best.load_state_dict(self.policy.state_dict())
            self.best_loss.copy_(loss)
            self.best_step.fill_(self.global_step)

    def configure_optimizers(self) -> OptimizerLRSchedulerConfig:
        """AdamW with a linear warm-up over a tenth of the steps, then a cosine."""
        settings, policy = self._settings, self.policy
        groups: list[dict[str, Any]] = [
            {"params": list(policy.rankers.parameters())},
            {"params": [policy.log_scale, policy.offset], "lr": HEAD_RATE * settings.lr},
        ]
        optimizer = torch.optim.AdamW(groups, lr=settings.lr, weight_decay=0.0)
        steps = settings.steps
        return scheduled(optimizer, steps=steps, warmup=steps // 10, final_factor=0.0)

    def configure_gradient_clipping(self, *args: object, **kwargs: object) -> None:
        """Clip the gradient of all heads together: they share one budget and one loss."""
        self.gradient_norms = nn.utils.clip_grad_norm_(self.policy.parameters(), _LONGEST_GRADIENT)

    def _losses(
        self,
        context: Context,
        point: CompressionPoint,
        budgets: Sequence[float],
        width: float | None,
    ) -> Tensor:
        """Loss at each mean budget per head in tokens: [budgets]; None: hard eviction."""
        scores = self.policy.scores(context)  # [A, N]
        gates = [self._log_gates(scores, budget, width) for budget in budgets]
        record = self._source.traces.record(point.sequence)
        return self._replies.losses(context, record, point, gates)

    def _log_gates(self, scores: Tensor, budget: float, width: float | None) -> Tensor:
        """Log gates of all tokens at one budget, 0 for protected ones: [A, N]."""
        tokens = scores.shape[1]
        free = self._protection.competing(tokens)
        competing = scores[:, free]
        if self._settings.allocator == "shared":
            competing = pooled_scores(competing[None], Shared.pool)[None]
        rows = len(competing)
        kept = round(rows * (budget - (tokens - competing.shape[1])))
        kept = min(max(kept, rows), competing.numel())
        gates = (
            hard_log_gates(competing, kept)
            if width is None
            else soft_log_gates(competing, kept, width)
        )
        log_gates = torch.zeros_like(scores)
        log_gates[:, free] = gates
        return log_gates


def soft_log_gates(scores: Tensor, kept: int, width: float) -> Tensor:
    """Logarithms of gates sigmoid((s - t) / width) that sum to `kept`: [A, N] -> [A, N].

    The threshold t is found by bisection. Gradients take its change along: a score that rises
    lowers the gates of all others.
    """
    with torch.no_grad():
        flat = scores.double()
        low, high = flat.min() - 40 * width, flat.max() + 40 * width
        for _ in range(_HALVINGS):
            middle = (low + high) / 2
            more = ((flat - middle) / width).sigmoid().sum() > kept
            low, high = torch.where(more, middle, low), torch.where(more, high, middle)
        threshold = ((low + high) / 2).to(scores.dtype)
    gates = ((scores - threshold) / width).sigmoid()
    slope = (gates * (1 - gates) / width).sum().detach()
    change = (gates - gates.detach()).sum() / slope.clamp_min(torch.finfo(slope.dtype).tiny)
    return F.logsigmoid((scores - threshold - change) / width)


def hard_log_gates(scores: Tensor, kept: int) -> Tensor:
    """0 for the `kept` best tokens of all heads and each head's best one, -inf for the others."""
    gates = torch.full_like(scores, -torch.inf)
    gates.view(-1)[scores.flatten().topk(kept).indices] = 0.0
    return gates.scatter(-1, scores.argmax(-1, keepdim=True), 0.0)
