"""What rankers are worth on held-out contexts: greedy rankings, no noise.

Costs are judged as the policy will be used: the protected tokens come first and count inside every
budget. Skill is what training maximises: over the tokens that take part in the reward.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from kvp.budgets import parse_budgets
from kvp.ranking import Protection, rank_tokens
from kvp.reward import cost_curve, skill_reward
from policies.ranker import HeadRankers
from train.contexts import Context
from train.objectives.batch import learnable

BUDGETS = parse_budgets("6.25%,12.5%,25%,50%")
"""Budgets whose lost attention is reported."""


@dataclass(frozen=True, kw_only=True)
class HeldOut:
    """Metrics of A heads, means over held-out contexts."""

    skill: Tensor
    """[A] share of the way from a random to the ideal ranking, <= 1; NaN for heads that were flat
    everywhere."""
    area: Tensor
    """[A] mean over budgets 0..N of the attention lost, as a fraction of all (E_b / W)."""
    oracle_area: Tensor
    """[A] the same for the ranking by true future attention."""
    lost: dict[str, Tensor]
    """Per reported budget: [A] fraction of the attention lost at it."""
    contexts: int
    """Held-out contexts the means are over."""

    def per_head(self) -> list[dict[str, float | None]]:
        """One JSON-ready mapping per agent."""
        columns = {"skill": self.skill, "area": self.area, "oracle_area": self.oracle_area}
        columns |= {f"lost_at_{budget}": values for budget, values in self.lost.items()}
        lists = {name: values.tolist() for name, values in columns.items()}
        return [
            {
                name: None if values[agent] != values[agent] else values[agent]
                for name, values in lists.items()
            }
            for agent in range(len(self.skill))
        ]

    @property
    def area_ratio(self) -> float:
        """Area of the policy over that of the oracle, each summed over heads; >= 1."""
        return float(self.area.sum() / self.oracle_area.sum())


@torch.no_grad()
def evaluate(
    rankers: HeadRankers, contexts: Iterable[Context], *, reward_protection: Protection
) -> HeldOut:
    """Judge `rankers` on contexts.

    Args:
        rankers: one per head.
        contexts: whole contexts, protected tokens included.
        reward_protection: tokens that take no part in `skill` (as in the training reward).

    Raises:
        ValueError: there are no contexts.
    """
    skills, counts, areas, oracles = [], [], [], []
    losses: dict[str, list[Tensor]] = {str(budget): [] for budget in BUDGETS}
    for context in contexts:
        scores = rankers(context.keys, context.values, context.positions, context.length)
        judged = context.without(reward_protection)
        kept = slice(reward_protection.sinks, context.length - reward_protection.recents)
        skills.append(skill_reward(judged.importance, rank_tokens(scores[:, kept])))
        counts.append(learnable(judged.importance))
        curve = _lost(context.importance, scores)
        areas.append(curve.mean(-1))
        oracles.append(_lost(context.importance, context.importance).mean(-1))
        for budget in BUDGETS:
            losses[str(budget)].append(curve[:, budget.tokens(context.length)])
    if not skills:
        raise ValueError("no held-out contexts")
    skill, counted = torch.stack(skills), torch.stack(counts)
    return HeldOut(
        skill=skill.where(counted, 0.0).sum(0) / counted.sum(0),
        area=torch.stack(areas).mean(0),
        oracle_area=torch.stack(oracles).mean(0),
        lost={budget: torch.stack(values).mean(0) for budget, values in losses.items()},
        contexts=len(skills),
    )


def _lost(importance: Tensor, scores: Tensor) -> Tensor:
    """Fraction of attention lost at budgets 0..N, protected tokens kept: [A, N] -> [A, N + 1]."""
    curve = cost_curve(importance, rank_tokens(scores, Protection()))
    return curve / curve[:, :1].clamp_min(1e-12)
