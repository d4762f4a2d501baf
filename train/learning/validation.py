"""Validate rankers on held-out contexts: greedy rankings, no noise, `kvp.ranking_metrics`.

Attention lost is measured with the protected tokens first, which count inside every budget; skill,
as the reward, with none protected.

A policy is useful where it ranks better than the methods that see no more and need no training: the
attention-free ones, with their default options, on the same contexts (`HEURISTICS`). Where the
question is seen, kvp eval also shows methods the last token (docs/decisions.md#last-token), which
contexts do not hold: the mean key of KeyDiff and the partitions of LagKV differ by it.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from kvp.budgets import parse_budgets
from kvp.geometry import Geometry
from kvp.protection import UNPROTECTED, Protection
from kvp.ranking_metrics import attention_lost, grid_budgets, lost_importance, skill
from kvp.scoring import View, group_budgets, score_layers
from policies.ranker import HeadRankers
from policies.registry import SCORERS
from train.data.contexts import RankingContext, scores_of

VALIDATED_BUDGETS = parse_budgets("6.25%,12.5%,25%,50%")
"""Budgets whose lost attention is reported."""
HEURISTICS = ("random", "streaming_llm", "knorm", "keydiff", "lagkv")
"""Methods to compare with; a new scorer does not change `best_heuristic` of later policies."""


@dataclass(frozen=True, kw_only=True)
class HeldOut:
    """Metrics of A heads, means over held-out contexts."""

    skill: Tensor
    """[A] float32 share of the way from a random to the ideal ranking, <= 1; NaN without signal."""
    lost: Mapping[str, Tensor]
    """Per reported budget: [A] float32 fraction of the attention lost at it."""
    contexts: int
    """Held-out contexts the means are over."""
    heuristics: Mapping[str, Tensor] = field(default_factory=dict)
    """Skill [A] float32 of attention-free heuristics on the same contexts."""

    def per_head(self) -> list[dict[str, float | str | None]]:
        """One JSON-ready mapping per KV head; null where a head has no signal."""
        columns = {f"lost_at_{budget}": values for budget, values in self.lost.items()}
        columns["skill"] = self.skill
        lists = {name: values.tolist() for name, values in columns.items()}
        heads: list[dict[str, float | str | None]] = []
        for index, best in enumerate(self.best_heuristics()):
            name, best_skill = best or (None, None)
            heads.append({"best_heuristic": name, "best_heuristic_skill": best_skill})
            for column, values in lists.items():
                heads[-1][column] = None if math.isnan(values[index]) else values[index]
        return heads

    def best_heuristics(self) -> list[tuple[str, float] | None]:
        """Best heuristic of every head and its skill; None without signal or heuristics."""
        names = list(self.heuristics)
        if not names:
            return [None] * len(self.skill)
        skills, indices = torch.stack([*self.heuristics.values()]).max(0)
        return [
            None if math.isnan(skill) else (names[index], skill)
            for skill, index in zip(skills.tolist(), indices.tolist(), strict=True)
        ]

    def count_losing_heads(self) -> int:
        """Number of heads on which the best heuristic has more skill than the policy."""
        skills = zip(self.skill.tolist(), self.best_heuristics(), strict=True)
        return sum(best is not None and best[1] > skill for skill, best in skills)


@torch.no_grad()
def validate_rankers(
    rankers: HeadRankers,
    contexts: Iterable[RankingContext],
    *,
    geometry: Geometry | None = None,
    heads: range = range(0),
) -> HeldOut:
    """Validate `rankers` on contexts; raises ValueError where there are none.

    With a `geometry`, the model's, the heuristics are measured as well; `heads` are then the heads
    of the model that the rankers rank.
    """
    skills, compared = [], []
    losses: dict[str, list[Tensor]] = {str(budget): [] for budget in VALIDATED_BUDGETS}
    for context in contexts:
        importance, tokens = context.importance, context.length
        ranked = [(scores_of(rankers, context), tokens)]  # [A, N]
        lost = lost_importance(importance, ranked, UNPROTECTED)  # [A, N + 1]
        skills.append(skill(importance, lost))
        lost = lost_importance(importance, ranked, Protection())
        for budget in VALIDATED_BUDGETS:
            losses[str(budget)].append(attention_lost(lost)[:, budget.tokens(tokens)])
        if geometry is not None:
            compared.append(heuristic_skills(context, geometry, heads))
    if not skills:
        raise ValueError("no held-out contexts")
    means = torch.stack(compared).nanmean(0) if compared else ()
    return HeldOut(
        skill=torch.stack(skills).nanmean(0).float(),
        lost={budget: torch.stack(values).mean(0).float() for budget, values in losses.items()},
        contexts=len(skills),
        heuristics=dict(zip(HEURISTICS, means, strict=True)) if compared else {},
    )


@torch.no_grad()
def heuristic_skills(context: RankingContext, geometry: Geometry, heads: range) -> Tensor:
    """Skill [M, A] float32 of the `HEURISTICS` on a context of these heads; NaN without signal."""
    width, views = geometry.kv_heads, []
    for number, layer in enumerate(geometry.model_layers):
        first, stop = max(heads.start, number * width), min(heads.stop, (number + 1) * width)
        if first < stop:
            part = slice(first - heads.start, stop - heads.start)
            views.append(
                View(
                    layer=layer,
                    heads=slice(first - number * width, stop - number * width),
                    keys=context.keys[None, part],
                    values=context.values[None, part],
                    positions=context.positions[None],
                    budget=1,
                )
            )
    skills = []
    for name in HEURISTICS:
        scorer, scored = SCORERS[name](), []
        for budgets in group_budgets(scorer.needs, grid_budgets(context.length)):
            at = (replace(view, budget=budgets[-1]) for view in views)
            scores = torch.cat(score_layers(scorer, at), dim=1)[0].cpu()  # [A, N]
            scored.append((scores, budgets[-1]))
        lost = lost_importance(context.importance, scored, UNPROTECTED)
        skills.append(skill(context.importance, lost))
    return torch.stack(skills).float().cpu()
