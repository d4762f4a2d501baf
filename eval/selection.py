"""From scorers to the tokens each row keeps: all layers and budgets, scored as rarely as possible.

Most methods rank tokens without looking at the budget; those are scored once per prompt. Whether a
method looks is observed, not declared: the view it gets remembers whether its budget was read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor

from kvp.ranking import Protection, rank_tokens
from kvp.scoring import Scorer, View

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


@torch.inference_mode()
def score_layers(
    scorer: Scorer, views_at: ViewsAt, budgets: Sequence[int]
) -> list[tuple[Tensor, tuple[int, ...]]]:
    """Scores [L, H, N] float32 of one prompt, with the budgets they are for.

    One entry that serves all budgets where the method never reads the budget, else one per budget.
    """
    results: list[tuple[Tensor, tuple[int, ...]]] = []
    for budget in budgets:
        views = [WatchedView.of(view) for view in views_at(budget)]
        scores = torch.cat([scorer.score(view) for view in views])
        if not any(view.budget_was_read for view in views):
            return [(scores, tuple(budgets))]
        results.append((scores, (budget,)))
    return results


def rank_layers(scores: Tensor, protection: Protection) -> Tensor:
    """Rankings [L, H, N] int64 on the CPU, most important token first."""
    return rank_tokens(scores, protection).cpu()


def kept_indices(ranking: Tensor, budget: int) -> Tensor:
    """Tokens kept at a budget, ascending: [L, H, N] -> [L, H, min(budget, N)] int64."""
    return ranking[..., :budget].sort(dim=-1).values
