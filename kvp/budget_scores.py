"""Scores for several budgets with as few calls of the scorer as possible.

Most methods rank tokens without looking at the budget; those are scored once per prompt. Whether a
method looks is observed, not declared: the view it gets remembers whether its budget was read.
Which tokens the scores keep is `kvp.selection`; the cost of a ranking, `kvp.metrics`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from kvp.scoring import Scorer, SelfSizing, View, score_layers

ViewsAt = Callable[[int], Iterable[View]]
"""Budget -> views of all layers, in order."""


class WatchedView(View):
    """A view that remembers whether its budget was read."""

    budget_was_read: bool = False

    @classmethod
    def of(cls, view: View) -> WatchedView:
        """The same view, watched."""
        return cls(**{field.name: getattr(view, field.name) for field in fields(View)})

    def __getattribute__(self, name: str) -> Any:  # noqa: ANN401 - any field of a view
        if name == "budget":
            object.__setattr__(self, "budget_was_read", True)
        return object.__getattribute__(self, name)


@dataclass(frozen=True, kw_only=True)
class BudgetScores:
    """Scores of one prompt, and the budgets they are for."""

    scores: Tensor
    """[L, H, N] float32, on the CPU."""
    budgets: tuple[int, ...]
    """Budgets the scores are for, in tokens per KV head."""
    sizes: Callable[[Tensor], Tensor] | None
    """From scores [L, H, N], protected tokens at +inf, to sizes [L, H] int64 (`SelfSizing`)."""


@torch.inference_mode()
def score_budgets(scorer: Scorer, views_at: ViewsAt, budgets: Sequence[int]) -> list[BudgetScores]:
    """Scores of one prompt for every budget.

    One entry that serves all budgets where the method never reads the budget, else one per budget.
    """
    results: list[BudgetScores] = []
    for budget in budgets:
        views = [WatchedView.of(view) for view in views_at(budget)]
        scores = torch.cat([layer.cpu() for layer in score_layers(scorer, views)])
        sizes = scorer.sizes if isinstance(scorer, SelfSizing) else None
        if not any(view.budget_was_read for view in views):
            return [BudgetScores(scores=scores, budgets=tuple(budgets), sizes=sizes)]
        results.append(BudgetScores(scores=scores, budgets=(budget,), sizes=sizes))
    return results
