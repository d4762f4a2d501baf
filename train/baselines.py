"""What attention-free heuristics are worth on the contexts a policy is judged on.

A policy that sees keys, values and positions only has earned its keep where it beats the methods
that see no more and need no training: those of the roster that are attention-free, with their
default options. They are judged as `eval` judges them: methods that look at the budget are asked at
several, and each of their rankings serves the budgets from the one below it up to its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kvp.budget_scores import score_budgets
from kvp.budgets import parse_budgets
from kvp.geometry import Geometry
from kvp.ranking import Protection, rank_tokens
from kvp.reward import cost_curve, skill_of_cost
from kvp.scoring import Scorer, View
from policies.registry import METHODS
from train.data.contexts import Context
from train.objectives.objective_batch import learnable

BUDGETS = parse_budgets("6.25%,12.5%,25%,50%")
"""Budgets whose lost attention is reported. Methods that look at the budget are asked at these and
at the whole cache, so that what they are told is at most twice the truth (above 3%)."""

Rankings = list[tuple[Tensor, int]]
"""Scores [A, N] and the largest budget they serve, by budget; the last is N."""


@dataclass(frozen=True, kw_only=True)
class Baselines:
    """What M heuristics are worth on A heads, means over contexts; see `HeldOut`."""

    names: tuple[str, ...]
    """Roster names of the M heuristics."""
    skill: Tensor
    """[M, A] float32, over the tokens that take part in the reward; NaN for heads that were flat
    everywhere."""
    area: Tensor
    """[M, A] float32 mean over budgets 0..N of the fraction of attention lost, protected."""

    def best(self) -> list[tuple[str, float] | None]:
        """Name and skill of the most skilful heuristic of every head; None for flat heads."""
        skills, places = self.skill.max(0)
        return [
            None if skill != skill else (self.names[place], skill)
            for skill, place in zip(skills.tolist(), places.tolist(), strict=True)
        ]


class BaselineEvaluator:
    """Judge every attention-free heuristic on contexts as they pass by."""

    def __init__(
        self, geometry: Geometry, *, reward_protection: Protection, heads: range | None = None
    ) -> None:
        """Expect contexts of these consecutive `heads` of a model, of all for None.

        `reward_protection` are the tokens that take no part in skill.
        """
        self._geometry = geometry
        self._protection = reward_protection
        self._heads = range(geometry.agents) if heads is None else heads
        entries = [entry for entry in METHODS.values() if entry.attention_free]
        self._scorers = [entry.builder() for entry in entries]
        self._skills = torch.zeros(len(self._scorers), len(self._heads))
        self._areas = torch.zeros_like(self._skills)
        self._counts = torch.zeros(len(self._heads))
        self._contexts = 0

    def watch(self, contexts: Iterable[Context]) -> Iterator[Context]:
        """The same contexts, each judged before it is handed on."""
        for context in contexts:
            self._judge(context)
            yield context

    def result(self) -> Baselines:
        """Means over what has passed by; NaN before the first context."""
        return Baselines(
            names=tuple(scorer.name for scorer in self._scorers),
            skill=self._skills / self._counts,
            area=self._areas / self._contexts,
        )

    @torch.no_grad()
    def _judge(self, context: Context) -> None:
        judged = context.without(self._protection).importance
        counted = learnable(judged)
        # The tokens of the reward compete for what the protected ones leave of a budget.
        competing = slice(context.length - judged.shape[-1] + 1, context.length)
        views = self._views(context)
        for place, scorer in enumerate(self._scorers):
            rankings = self._rankings(scorer, views, context)
            lost = lost_by_budget(context.importance, rankings, Protection())
            self._areas[place] += (lost.mean(-1) / lost[:, 0].clamp_min(1e-12)).cpu()
            if self._protection != Protection():
                lost = lost_by_budget(context.importance, rankings, self._protection)
            skill = skill_of_cost(judged, lost[:, competing].sum(-1))
            self._skills[place] += skill.where(counted, 0.0).cpu()
        self._counts += counted.cpu()
        self._contexts += 1

    def _views(self, context: Context) -> list[View]:
        """Every layer that has some of the heads; those not held are zero.

        Heuristics see head by head, so that these change nothing for the others.
        """
        width = self._geometry.kv_heads
        layers = range(self._heads[0] // width, self._heads[-1] // width + 1)
        before = self._heads[0] - layers.start * width
        after = len(layers) * width - before - len(self._heads)

        def by_layer(part: Tensor) -> Tensor:
            whole = torch.nn.functional.pad(part, (0, 0, 0, 0, before, after))
            return whole.view(len(layers), 1, width, *part.shape[1:])

        return [
            View(layer=layer, keys=keys, values=values, positions=context.positions[None], budget=1)
            for layer, keys, values in zip(
                layers, by_layer(context.keys), by_layer(context.values), strict=True
            )
        ]

    def _rankings(self, scorer: Scorer, views: list[View], context: Context) -> Rankings:
        """What a heuristic says about the heads of a context."""
        scored = score_budgets(
            scorer,
            lambda budget: (replace(view, budget=budget) for view in views),
            grid_budgets(context.length),
        )
        start = self._heads[0] % self._geometry.kv_heads
        own = slice(start, start + len(self._heads))
        rankings: Rankings = []
        for part in scored:
            scores = part.scores.flatten(0, 1)[own]
            if rankings and torch.equal(scores, rankings[-1][0]):
                rankings.pop()
            rankings.append((scores, part.budgets[-1]))
        device = context.importance.device
        return [(scores.to(device), budget) for scores, budget in rankings]


def grid_budgets(tokens: int) -> list[int]:
    """Budgets at which methods that look at them are asked, ascending; the last is `tokens`."""
    return sorted({*(budget.tokens(tokens) for budget in BUDGETS), tokens})


def lost_by_budget(importance: Tensor, rankings: Rankings, protection: Protection) -> Tensor:
    """Importance [A, N] lost at budgets 0..N, each by the ranking that serves it: [A, N + 1]."""
    lost = torch.empty(importance.shape[0], importance.shape[1] + 1, device=importance.device)
    start = 0
    for scores, last in rankings:
        curve = cost_curve(importance, rank_tokens(scores, protection))
        lost[:, start : last + 1] = curve[:, start : last + 1]
        start = last + 1
    return lost
