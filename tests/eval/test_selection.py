from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from eval.selection import kept_indices, rank_layers, score_layers
from kvp.ranking import UNPROTECTED, Protection
from kvp.scoring import Needs, View


class _ByNorm:
    """Ranks by key norm; counts how often it is asked."""

    name = "by_norm"
    needs = Needs()

    def __init__(self, *, reads_budget: bool) -> None:
        self.reads_budget = reads_budget
        self.calls: list[int] = []

    def score(self, view: View) -> Tensor:
        self.calls.append(view.layer)
        scale = view.budget if self.reads_budget else 1
        return view.keys.norm(dim=-1) * scale


def _views_at(budget: int) -> Iterator[View]:
    for layer in range(2):
        keys = torch.arange(12.0).view(1, 2, 6, 1) * (1 - 2 * layer) + 1
        yield View(
            layer=layer, keys=keys, values=keys, positions=torch.arange(6)[None], budget=budget
        )


def test_a_method_blind_to_the_budget_is_scored_once_per_layer() -> None:
    scorer = _ByNorm(reads_budget=False)
    ((scores, budgets),) = score_layers(scorer, _views_at, [2, 4, 5])
    assert scorer.calls == [0, 1]
    assert budgets == (2, 4, 5)
    assert scores.shape == (2, 2, 6)


def test_a_method_that_reads_the_budget_is_scored_for_each() -> None:
    scorer = _ByNorm(reads_budget=True)
    results = score_layers(scorer, _views_at, [2, 4])
    assert scorer.calls == [0, 1, 0, 1]
    assert [budgets for _, budgets in results] == [(2,), (4,)]
    assert torch.equal(results[1][0], 2 * results[0][0])


def test_kept_tokens_are_the_best_ones_in_order() -> None:
    scores = torch.tensor([[[0.0, 5.0, 1.0, 4.0, 3.0, 2.0]]])
    ranking = rank_layers(scores, UNPROTECTED)
    assert kept_indices(ranking, 3).tolist() == [[[1, 3, 4]]]
    assert kept_indices(ranking, 9).tolist() == [[[0, 1, 2, 3, 4, 5]]]
    protected = rank_layers(scores, Protection(sinks=1, recents=1))
    assert kept_indices(protected, 3).tolist() == [[[0, 1, 5]]]
