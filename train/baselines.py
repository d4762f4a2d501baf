"""Evaluate attention-free heuristics on the contexts a policy is evaluated on.

A policy that sees keys, values and positions only is useful where it ranks better than the
methods that see no more and need no training: the attention-free ones of the registry, with their
default options. Numbers are those of `kvp.metrics`, as in kvp-eval. Where the question is seen,
kvp-eval also shows methods the prompt's last token (docs/decisions.md#last-token), which
contexts do not hold: the mean key of KeyDiff and the partitions of LagKV differ by that token.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kvp.geometry import Geometry
from kvp.metrics import area, grid_budgets, lost_importance, skill
from kvp.ranking import Protection
from kvp.scoring import Scorer, View, score_budgets
from policies.registry import METHODS, attention_free
from train.data.contexts import Context

_SAME = ("random_per_layer", "ring")
"""Methods that rank the tokens of a single head as `random` does, or nearly as `streaming_llm`."""


@dataclass(frozen=True, kw_only=True)
class Baselines:
    """Metrics of M heuristics on A heads, means over contexts; see `HeldOut`."""

    names: tuple[str, ...]
    """Registry names of the M heuristics."""
    skill: Tensor
    """[M, A] float32, over the tokens that take part in the reward; NaN for heads without signal in
    every context."""
    area: Tensor
    """[M, A] float32, with protected tokens kept."""

    def best(self) -> list[tuple[str, float] | None]:
        """Name and skill of the most skilful heuristic of every head; None without signal."""
        skills, indices = self.skill.max(0)
        return [
            None if skill != skill else (self.names[index], skill)
            for skill, index in zip(skills.tolist(), indices.tolist(), strict=True)
        ]


class BaselineEvaluator:
    """Evaluate every attention-free heuristic on contexts, one after the other."""

    def __init__(
        self, geometry: Geometry, *, reward_protection: Protection, heads: range | None = None
    ) -> None:
        """Expect contexts of these consecutive `heads` of a model, of all for None.

        `reward_protection` are the tokens that take no part in skill.
        """
        self._geometry = geometry
        self._protection = reward_protection
        self._heads = range(geometry.total_kv_heads) if heads is None else heads
        self._scorers = [
            METHODS[name]() for name in METHODS if attention_free(name) and name not in _SAME
        ]
        self._skills: list[Tensor] = []  # per context [M, A]
        self._areas: list[Tensor] = []

    def watch(self, contexts: Iterable[Context]) -> Iterator[Context]:
        """The same contexts, each evaluated before it is handed on."""
        for context in contexts:
            self._evaluate(context)
            yield context

    def result(self) -> Baselines:
        """Means over the contexts so far; NaN before the first context."""
        if not self._skills:
            no_signal = torch.full((len(self._scorers), len(self._heads)), torch.nan)
            self._skills, self._areas = [no_signal], [no_signal]
        return Baselines(
            names=tuple(scorer.name for scorer in self._scorers),
            skill=torch.stack(self._skills).nanmean(0),
            area=torch.stack(self._areas).mean(0),
        )

    @torch.no_grad()
    def _evaluate(self, context: Context) -> None:
        views = self._views(context)
        skills, areas = [], []
        for scorer in self._scorers:
            scored = self._scored(scorer, views, context.length)
            lost = lost_importance(context.importance, scored, Protection())  # [A, N + 1]
            areas.append(area(lost))
            if self._protection != Protection():
                lost = lost_importance(context.importance, scored, self._protection)
            skills.append(skill(context.importance, lost, self._protection))
        self._skills.append(torch.stack(skills).float().cpu())
        self._areas.append(torch.stack(areas).float().cpu())

    def _views(self, context: Context) -> list[View]:
        """Every layer that has some of the heads; the other heads are zero.

        Heuristics see head by head, so that these change nothing for the others.
        """
        width = self._geometry.kv_heads
        layers = range(self._heads[0] // width, self._heads[-1] // width + 1)
        before = self._heads[0] - layers.start * width
        after = len(layers) * width - before - len(self._heads)

        def by_layer(part: Tensor) -> Tensor:
            whole = torch.nn.functional.pad(part, (0, 0, 0, 0, before, after))  # [L * H, N, D]
            return whole.view(len(layers), 1, width, *part.shape[1:])  # [L, 1, H, N, D]

        return [
            View(
                layer=self._geometry.model_layers[layer],
                keys=keys,
                values=values,
                positions=context.positions[None],
                budget=1,
            )
            for layer, keys, values in zip(
                layers, by_layer(context.keys), by_layer(context.values), strict=True
            )
        ]

    def _scored(self, scorer: Scorer, views: list[View], tokens: int) -> list[tuple[Tensor, int]]:
        """Scores [A, N] of the heads, and the largest budget they serve."""
        parts = score_budgets(
            scorer,
            lambda budget: (replace(view, budget=budget) for view in views),
            grid_budgets(tokens),
        )
        start = self._heads[0] % self._geometry.kv_heads
        heads = slice(start, start + len(self._heads))
        return [(part.scores.flatten(0, 1)[heads], part.budgets[-1]) for part in parts]
