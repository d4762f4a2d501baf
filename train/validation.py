"""What rankers are worth on held-out contexts: greedy rankings, no noise.

Costs are judged as the policy will be used: the protected tokens come first and count inside every
budget. Skill is over the tokens that take part in the reward. `evaluate` judges rankers alone,
`judge` beside the heuristics that see no more than they do.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kvp.budgets import parse_budget_weights
from kvp.geometry import Geometry
from kvp.ranking import Protection, rank_tokens
from kvp.reward import cost_curve, rank_coefficients, skill_reward
from policies.ranker import HeadRankers, parameters_per_head
from train.baselines import BUDGETS, BaselineEvaluator, Baselines
from train.data.contexts import Context
from train.objectives.objective_batch import learnable


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
    parameters: int
    """Trained values of one head's ranker."""
    baselines: Baselines | None = None
    """What attention-free heuristics are worth on the same contexts; None where nobody asked."""

    @property
    def excess(self) -> Tensor:
        """[A] area - oracle_area, >= 0: the fraction of future attention that the policy loses
        beyond what must be lost, mean over budgets.

        A difference, not a quotient: where a few tokens get all the attention the oracle loses next
        to nothing, and a quotient would make heads look bad that lose next to nothing, too.
        """
        return self.area - self.oracle_area

    @property
    def area_ratio(self) -> float:
        """Area of the policy over that of the oracle, each summed over heads; >= 1."""
        return float(self.area.sum() / self.oracle_area.sum())

    def per_head(self) -> list[dict[str, float | str | None]]:
        """One JSON-ready mapping per agent; null where a head was flat everywhere."""
        columns = {"skill": self.skill, "area": self.area, "oracle_area": self.oracle_area}
        columns["excess"] = self.excess
        columns |= {f"lost_at_{budget}": values for budget, values in self.lost.items()}
        lists = {name: values.tolist() for name, values in columns.items()}
        heads: list[dict[str, float | str | None]] = []
        for agent, best in enumerate(self.best_baselines()):
            own = {name: values[agent] for name, values in lists.items()}
            head: dict[str, float | str | None] = {
                name: None if value != value else value for name, value in own.items()
            }
            head["parameters"] = self.parameters
            if self.baselines is not None:
                head["best_heuristic"], head["best_heuristic_skill"] = best or (None, None)
            heads.append(head)
        return heads

    def best_baselines(self) -> list[tuple[str, float] | None]:
        """Best heuristic of every head and its skill; None for flat heads and without rivals."""
        return [None] * len(self.skill) if self.baselines is None else self.baselines.best()

    def beaten(self) -> list[int]:
        """Agents on which the best heuristic has more skill than the policy."""
        skills = zip(self.skill.tolist(), self.best_baselines(), strict=True)
        return [agent for agent, (skill, best) in enumerate(skills) if best and best[1] > skill]


def evaluate_with_baselines(
    rankers: HeadRankers,
    contexts: Iterable[Context],
    geometry: Geometry,
    *,
    reward_protection: Protection,
    heads: range | None = None,
) -> HeldOut:
    """Judge `rankers`, over all budgets alike, and heuristics on the same contexts, one by one.

    Args:
        rankers: one per head.
        contexts: whole contexts, protected tokens included.
        geometry: layers and heads of the whole model.
        reward_protection: tokens that take no part in skill (as in the training reward).
        heads: which of the model's heads `rankers` and contexts are for, None for all.

    Raises:
        ValueError: there are no contexts.
    """
    baselines = BaselineEvaluator(geometry, reward_protection=reward_protection, heads=heads)
    result = evaluate(rankers, baselines.watch(contexts), reward_protection=reward_protection)
    return replace(result, baselines=baselines.result())


@torch.no_grad()
def evaluate(
    rankers: HeadRankers,
    contexts: Iterable[Context],
    *,
    reward_protection: Protection,
    budgets: str = "all",
) -> HeldOut:
    """Judge `rankers` on contexts.

    Args:
        rankers: one per head.
        contexts: whole contexts, protected tokens included.
        reward_protection: tokens that take no part in `skill` (as in the training reward).
        budgets: budgets that count in `skill`, as in `Recipe.budgets`; all others report all.

    Raises:
        UsageError: `budgets` cannot be read.
        ValueError: there are no contexts.
    """
    weights = parse_budget_weights(budgets)
    skills, counts, areas, oracles = [], [], [], []
    losses: dict[str, list[Tensor]] = {str(budget): [] for budget in BUDGETS}
    for context in contexts:
        scores = rankers(context.keys, context.values, context.positions, context.length)
        judged = context.without(reward_protection)
        kept = reward_protection.competing(context.length)
        ranked = judged.importance.shape[-1]
        coefficients = rank_coefficients(weights, ranked, protected=context.length - ranked)
        ranking = rank_tokens(scores[:, kept])
        skills.append(skill_reward(judged.importance, ranking, coefficients))
        counts.append(learnable(judged.importance))
        curve = _lost(context.importance, scores)
        areas.append(curve.mean(-1))
        oracles.append(_lost(context.importance, context.importance).mean(-1))
        for budget in BUDGETS:
            losses[str(budget)].append(curve[:, budget.tokens(context.length)])
    if not skills:
        raise ValueError("no held-out contexts")
    skill, counted = torch.stack(skills, dim=1), torch.stack(counts, dim=1)
    return HeldOut(
        skill=skill.where(counted, 0.0).sum(1) / counted.sum(1),
        area=torch.stack(areas, dim=1).mean(1),
        oracle_area=torch.stack(oracles, dim=1).mean(1),
        lost={budget: torch.stack(values, dim=1).mean(1) for budget, values in losses.items()},
        contexts=len(skills),
        parameters=parameters_per_head(rankers.spec),
    )


def _lost(importance: Tensor, scores: Tensor) -> Tensor:
    """Fraction of attention lost at budgets 0..N, protected tokens kept: [A, N] -> [A, N + 1]."""
    curve = cost_curve(importance, rank_tokens(scores, Protection()))
    return curve / curve[:, :1].clamp_min(1e-12)
