"""WindowKV (arXiv 2503.17922): whole windows of the context, selected once per group of layers.

Formula, settings of the paper, and where its code differs: docs/methods/windowkv.md. Where alpha +
m omega tokens are the paper's set of m windows, sizes between are filled with the next window's
best tokens; alpha counts inside the budget. Scores are ranks, so they say nothing across layers.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Final, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from kvp.bounds import Positive
from kvp.ops.attention import recent_attention
from kvp.ranking import rank_tokens
from kvp.scoring import AUTO_GROUP, Needs, View
from policies.base import AUTO, Auto, BaseScorer, Grid, Presets

TaskType = Literal["qa", "aggregation"]
QA: Final = "qa"
"""Information localisation: a few passages of the context hold the answer."""
AGGREGATION: Final = "aggregation"
"""Summaries, code, counting: the answer is spread over the context."""
TASK_TYPES: tuple[TaskType, ...] = (QA, AGGREGATION)


class WindowSizes(NamedTuple):
    """Numbers of tokens for one task type."""

    observed: int
    window: int
    top: int


SETTINGS: Mapping[str, Mapping[str, WindowSizes]] = {
    "qwen": {QA: WindowSizes(4, 32, 32), AGGREGATION: WindowSizes(16, 32, 16)},
    "llama": {QA: WindowSizes(16, 8, 8), AGGREGATION: WindowSizes(32, 16, 8)},
}
"""The paper's settings by model and task type."""


@dataclass(frozen=True, kw_only=True)
class WindowKV(BaseScorer):
    """Keep windows the last tokens attend to, per group of layers."""

    task: TaskType = QA
    """What the prompt asks for, `qa` or `aggregation`."""
    setting: Literal["qwen", "llama"] = "qwen"
    """Meaning of `auto` below: `qwen` or `llama`."""
    observed: Positive | Auto = AUTO
    """Last tokens that vote and are kept (alpha), or `auto` to follow setting and task."""
    window: Positive | Auto = AUTO
    """Tokens per window (omega), or `auto`."""
    top: Positive | Auto = AUTO
    """Tokens of a window that count for its score (p), or `auto`: all (qa) or half."""
    per_head: bool = False
    """Take the top of every query head, then the mean over heads."""
    group: Positive | Auto = AUTO
    """Layers that share one choice (gamma), or `auto`."""

    base_name: ClassVar[str] = "windowkv"
    cost: ClassVar[str] = "one window's attention per group of layers, O(Q window N D)"
    presets: ClassVar[Presets] = {"llama": {"setting": "llama"}}
    grid: ClassVar[Grid] = {
        "window": (AUTO, 4, 8, 16, 32, 64),
        "observed": (AUTO, 2, 4, 8, 16, 32),
        "top": (AUTO, 1, 2, 4, 8, 16),
        "per_head": (False, True),
        "group": (AUTO, 1),
    }

    @property
    def needs(self) -> Needs:
        """The observation queries and layer sharing."""
        group = self.group if isinstance(self.group, int) else AUTO_GROUP
        return Needs(queries=self.sizes_for(self.task).observed, layer_group=group)

    def sizes_for(self, task_type: str) -> WindowSizes:
        """The numbers for a task type, options included."""
        paper = SETTINGS[self.setting][task_type]
        window = self.window if isinstance(self.window, int) else paper.window
        top = window if task_type == QA else max(1, window // 2)
        return WindowSizes(
            observed=self.observed if isinstance(self.observed, int) else paper.observed,
            window=window,
            top=min(self.top, window) if isinstance(self.top, int) else top,
        )

    def score(self, view: View) -> Tensor:
        """Minus the rank, observation tokens from 0 up: [B, H, N] float32."""
        assert view.queries is not None
        batch, heads, tokens, _ = view.keys.shape
        sizes = self.sizes_for(self.task)
        before = max(tokens - sizes.observed, 0)
        scores = torch.arange(tokens, dtype=torch.float32, device=view.keys.device) - before
        scores = scores.repeat(batch, 1)
        if before:
            attention = recent_attention(view.queries, view.keys, sizes.observed)
            votes = attention[..., :before].mean(dim=-2).flatten(1, 2)
            scores[:, :before] = -1 - self._rank_by_window(votes, sizes).float()
        return scores[:, None].expand(-1, heads, -1).contiguous()

    def _rank_by_window(self, votes: Tensor, sizes: WindowSizes) -> Tensor:
        """Rank of every token [B, M] int64, 0 = first, from attention per query head [B, Q, M]."""
        size = sizes.window
        short = -votes.shape[-1] % size
        shared = votes.mean(dim=1)  # [B, M]
        voters = votes if self.per_head else shared[:, None]  # [B, Q or 1, M]
        windows = torch.unflatten(F.pad(voters, (0, short)), -1, (-1, size))  # of `size` tokens
        sums = windows.topk(sizes.top, dim=-1).values.sum(dim=-1).mean(dim=1)  # [B, windows]
        outer = rank_tokens(sums).argsort(dim=-1)  # rank of each window
        padded = torch.unflatten(F.pad(shared, (0, short), value=-torch.inf), -1, (-1, size))
        inner = rank_tokens(padded).argsort(dim=-1)  # rank inside the window
        ranks = (outer[..., None] * size + inner).flatten(-2)  # [B, M + short]
        return ranks[:, : votes.shape[-1]]
