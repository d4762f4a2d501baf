"""From scores to the tokens that stay: the one path that eviction, evaluation and search share.

Scores are ranked under a protection; an allocator turns them into counts per layer and KV head; the
best `count` tokens of every head stay. Without an allocator every head keeps the budget.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property

import torch
from torch import Tensor

from kvp.allocation import (
    Allocator,
    Request,
    allocated_counts,
    protected_scores,
    ranked_tokens,
)
from kvp.budgets import Budget
from kvp.errors import UsageError
from kvp.ranking import Protection, rank_tokens

Sizes = Callable[[Tensor], Tensor]
"""Scores [L, H, N], protected tokens at +inf -> the scorer's own sizes [L, H] int64."""


def kept_tokens(budget: Budget, cached: int, protection: Protection) -> int:
    """Tokens per KV head that `budget` keeps of `cached` ones; at most all of them.

    A percentage never keeps fewer than the protected tokens, so that a short prompt among long ones
    stops nothing. Raises UsageError for a token count below them.
    """
    if budget.count is not None and budget.count < min(protection.tokens, cached):
        raise UsageError(
            f"budget {budget} keeps {budget} tokens, fewer than the {protection.tokens} protected "
            "ones: raise the budget or turn protection off"
        )
    return min(max(budget.tokens(cached), protection.tokens), cached)


class Selection:
    """One prompt's tokens, ranked under one protection; serves every allocator and budget."""

    def __init__(self, scores: Tensor, protection: Protection, sizes: Sizes | None = None) -> None:
        """Rank the tokens of every head.

        Args:
            scores: [L, H, N] floats, higher = keep; further leading axes where there is no
                allocator.
            protection: tokens that come before all others.
            sizes: the scorer's own sizes, where it has them (`kvp.scoring.SelfSizing`).
        """
        self.ranking = rank_tokens(scores, protection)
        """[L, H, N] int64 token indices, most important first."""
        self._scores, self._protection, self._sizes = scores, protection, sizes

    @cached_property
    def _protected_scores(self) -> Tensor:
        """[L, H, N] float32 scores, protected tokens at +inf."""
        return protected_scores(self._scores, self._protection)

    def counts(self, budget: int, allocator: Allocator | None = None) -> Tensor:
        """Tokens per layer and KV head at a budget (tokens per KV head): [L, H] int64.

        Raises UsageError on counts of an allocator that cannot be kept.
        """
        tokens = self.ranking.shape[-1]
        if allocator is None:
            return torch.full(
                self.ranking.shape[:-1], min(budget, tokens), device=self.ranking.device
            )
        request = Request(
            scores=self._protected_scores,
            budget=min(budget, tokens),
            floor=max(1, min(self._protection.tokens, tokens)),
            sizes=None if self._sizes is None else self._sizes(self._protected_scores),
        )
        return allocated_counts(allocator, request)

    def tokens(self, budget: int, allocator: Allocator | None = None) -> Tensor:
        """Tokens that stay: [L, H, S] int64 ascending, S the largest count, -1 after a head's last.

        Raises UsageError as `counts`.
        """
        return self.tokens_of(self.counts(budget, allocator))

    def tokens_of(self, counts: Tensor) -> Tensor:
        """The first `counts` [L, H] tokens of every head, as `tokens`."""
        return ranked_tokens(self.ranking, counts)


def select(scores: Tensor, budget: int, protection: Protection) -> Tensor:
    """Tokens that stay of scores [..., N], equally many per head: as `Selection.tokens`."""
    return Selection(scores, protection).tokens(budget)
