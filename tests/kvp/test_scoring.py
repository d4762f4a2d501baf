from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from kvp.scoring import Needs, View, score_budgets


class _ByNorm:
    """Ranks by key norm; counts its calls."""

    name = "by_norm"

    def __init__(self, *, reads_budget: bool, layer_group: int = 1) -> None:
        self.needs = Needs(layer_group=layer_group)
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
    (scored,) = score_budgets(scorer, _views_at, [2, 4, 5])
    assert scorer.calls == [0, 1]
    assert scored.budgets == (2, 4, 5)
    assert scored.scores.shape == (2, 2, 6)
    assert scored.sizes is None


def test_a_method_that_reads_the_budget_is_scored_for_each() -> None:
    scorer = _ByNorm(reads_budget=True)
    results = score_budgets(scorer, _views_at, [2, 4])
    assert scorer.calls == [0, 1, 0, 1]
    assert [scored.budgets for scored in results] == [(2,), (4,)]
    assert torch.equal(results[1].scores, 2 * results[0].scores)


def test_scores_of_tokens_that_are_fed_again_are_dropped() -> None:
    def fed_again(budget: int) -> Iterator[View]:
        return (replace(view, fed_again=2) for view in _views_at(budget))

    for group in (1, 2):
        scorer = _ByNorm(reads_budget=True, layer_group=group)
        whole = score_budgets(scorer, _views_at, [2, 4])
        dropped = score_budgets(scorer, fed_again, [2, 4])
        for part, all_of_it in zip(dropped, whole, strict=True):
            assert torch.equal(part.scores, all_of_it.scores[..., :4])


def test_layers_that_share_are_scored_once_per_group() -> None:
    scorer = _ByNorm(reads_budget=False, layer_group=2)
    (scored,) = score_budgets(scorer, _views_at, [3])
    assert scorer.calls == [0]
    assert torch.equal(scored.scores[0], scored.scores[1])
