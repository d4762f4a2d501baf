from __future__ import annotations

import pytest
import torch
from torch import Tensor

from eval.selection import Ranked
from kvp.allocation import Request
from kvp.budget_scores import Scored
from kvp.errors import UsageError
from kvp.ranking import UNPROTECTED, Protection

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
