from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from eval.selection import Ranked, Scored, score_budgets
from kvp.allocation import Request
from kvp.errors import UsageError
from kvp.ranking import UNPROTECTED, Protection
from kvp.scoring import Needs, View


class _ByNorm:
    """Ranks by key norm; counts how often it is asked."""

    name = "by_norm"

    def __init__(self, *, reads_budget: bool, share: int = 1) -> None:
        self.needs = Needs(share=share)
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


def test_layers_that_share_are_scored_once_per_group() -> None:
    scorer = _ByNorm(reads_budget=False, share=2)
    (scored,) = score_budgets(scorer, _views_at, [3])
    assert scorer.calls == [0]
    assert torch.equal(scored.scores[0], scored.scores[1])


SCORES = torch.tensor([[[0.0, 5.0, 1.0, 4.0, 3.0, 2.0]]])


def _ranked(scores: Tensor, protection: Protection, sizes: Tensor | None = None) -> Ranked:
    own = None if sizes is None else lambda raised: sizes
    return Ranked(Scored(scores=scores, budgets=(1,), sizes=own), protection)


def test_kept_tokens_are_the_best_ones_in_order() -> None:
    ranked = _ranked(SCORES, UNPROTECTED)
    assert ranked.kept(None, 3).tolist() == [[[1, 3, 4]]]
    assert ranked.kept(None, 9).tolist() == [[[0, 1, 2, 3, 4, 5]]]
    protected = _ranked(SCORES, Protection(sinks=1, recents=1))
    assert protected.kept(None, 3).tolist() == [[[0, 1, 5]]]


class _Fixed:
    """An allocator that remembers its request and gives what it was made with."""

    name = "fixed"

    def __init__(self, counts: list[list[int]]) -> None:
        self.counts = torch.tensor(counts)
        self.asked: list[Request] = []

    def allocate(self, request: Request) -> Tensor:
        self.asked.append(request)
        return self.counts


def test_allocated_heads_keep_their_own_numbers_of_tokens() -> None:
    scores = torch.stack([SCORES[0, 0], -SCORES[0, 0]])[None]
    rule = _Fixed([[1, 3]])
    sizes = torch.tensor([[5, 6]])
    ranked = _ranked(scores, Protection(sinks=1, recents=0), sizes)
    assert ranked.kept(rule, 2).tolist() == [[[0, -1, -1], [0, 2, 5]]]
    (request,) = rule.asked
    assert (request.budget, request.floor, request.total) == (2, 1, 4)
    assert request.scores[..., 0].isinf().all()
    assert request.scores[..., 1:].isfinite().all()
    assert request.sizes is sizes


def test_counts_that_cannot_be_kept_are_refused() -> None:
    ranked = _ranked(SCORES, Protection(sinks=1, recents=1))
    for counts in ([[1]], [[7]], [[3, 3]]):
        with pytest.raises(UsageError, match="allocator fixed"):
            ranked.kept(_Fixed(counts), 3)
