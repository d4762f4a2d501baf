"""Evaluate rankers on held-out contexts: greedy rankings, no noise, the numbers of `kvp.metrics`.

Attention lost is measured as the policy will be used: the protected tokens come first and count
inside every budget. Skill is over the tokens that take part in the reward.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from kvp.budgets import parse_budgets
from kvp.metrics import area, attention_lost, lost_importance, skill
from kvp.ranking import Protection
from policies.ranker import HeadRankers, parameters_per_head
from train.data.contexts import RankingContext, scores_of

VALIDATED_BUDGETS = parse_budgets("6.25%,12.5%,25%,50%")
"""Budgets whose lost attention is reported."""


@dataclass(frozen=True, kw_only=True)
class HeldOut:
    """Metrics of A heads, means over held-out contexts."""

    skill: Tensor
    """[A] float32 share of the way from a random to the ideal ranking, <= 1; NaN for heads without
    signal in every context."""
    area: Tensor
    """[A] float32 mean over budgets 0..N of the attention lost, as a fraction of all (E_b / W)."""
    oracle_area: Tensor
    """[A] float32, the same for the ranking by the true importance."""
    lost: Mapping[str, Tensor]
    """Per reported budget: [A] float32 fraction of the attention lost at it."""
    contexts: int
    """Held-out contexts the means are over."""
    parameters: int
    """Trained values of one head's ranker."""

    @property
    def excess(self) -> Tensor:
        """[A] area - oracle_area, >= 0: the fraction of future attention that the policy loses
        beyond what must be lost, mean over budgets.

        A difference, not a quotient: where a few tokens get all the attention the oracle loses next
        to nothing, and a quotient would make heads look bad that lose next to nothing, too.
        """
        return self.area - self.oracle_area

    def per_head(self) -> list[dict[str, float | None]]:
        """One JSON-ready mapping per KV head; null where a head has no signal."""
        columns = {"skill": self.skill, "area": self.area, "oracle_area": self.oracle_area}
        columns["excess"] = self.excess
        columns |= {f"lost_at_{budget}": values for budget, values in self.lost.items()}
        lists = {name: values.tolist() for name, values in columns.items()}
        return [
            {
                **{
                    name: None if math.isnan(values[head]) else values[head]
                    for name, values in lists.items()
                },
                "parameters": self.parameters,
            }
            for head in range(len(self.skill))
        ]


@torch.no_grad()
def evaluate(
    rankers: HeadRankers, contexts: Iterable[RankingContext], *, reward_protection: Protection
) -> HeldOut:
    """Evaluate `rankers` on whole contexts, protected tokens included.

    Those of `reward_protection` take no part in `skill`, as in the training reward. Raises
    ValueError without contexts.
    """
    skills, areas, oracles = [], [], []
    losses: dict[str, list[Tensor]] = {str(budget): [] for budget in VALIDATED_BUDGETS}
    for context in contexts:
        importance, tokens = context.importance, context.length
        scores = scores_of(rankers, context)  # [A, N]
        ranked = [(scores, tokens)]
        lost = lost_importance(importance, ranked, reward_protection)  # [A, N + 1]
        skills.append(skill(importance, lost, reward_protection))
        if reward_protection != Protection():
            lost = lost_importance(importance, ranked, Protection())
        areas.append(area(lost))
        ideal = lost_importance(importance, [(importance, tokens)], Protection())
        oracles.append(area(ideal))
        for budget in VALIDATED_BUDGETS:
            losses[str(budget)].append(attention_lost(lost)[:, budget.tokens(tokens)])
    if not skills:
        raise ValueError("no held-out contexts")
    return HeldOut(
        skill=torch.stack(skills).nanmean(0).float(),
        area=torch.stack(areas).mean(0).float(),
        oracle_area=torch.stack(oracles).mean(0).float(),
        lost={budget: torch.stack(values).mean(0).float() for budget, values in losses.items()},
        contexts=len(skills),
        parameters=parameters_per_head(rankers.spec),
    )
