"""From scores to the tokens each row keeps: all layers, every allocator and budget.

Scores (`kvp.budget_scores`) serve every allocator, and a ranking under one protection every
allocator and budget.
"""

from __future__ import annotations

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
from kvp.budget_scores import Scored
from kvp.ranking import Protection, rank_tokens


class Ranked:
    """The ranking of one prompt's tokens under one protection, and what is kept by it."""

    def __init__(self, scored: Scored, protection: Protection) -> None:
        """Rank every head's tokens."""
        self.ranking = rank_tokens(scored.scores, protection)
        """[L, H, N] int64 token indices, most important first."""
        self._scored = scored
        self._protection = protection

    @cached_property
    def _raised(self) -> Tensor:
        return protected_scores(self._scored.scores, self._protection)

    def counts(self, rule: Allocator | None, budget: int) -> Tensor:
        """Tokens per layer and KV head at a budget: [L, H] int64; no rule gives all the same.

        Raises UsageError on counts that cannot be kept.
        """
        layers, heads, tokens = self.ranking.shape
        if rule is None:
            return torch.full((layers, heads), min(budget, tokens))
        request = Request(
            scores=self._raised,
            budget=min(budget, tokens),
            floor=max(1, min(self._protection.tokens, tokens)),
            sizes=None if self._scored.sizes is None else self._scored.sizes(self._raised),
        )
        return allocated_counts(rule, request)

    def kept(self, rule: Allocator | None, budget: int) -> Tensor:
        """Tokens that stay: [L, H, largest count] int64, ascending, -1 after a head's last one."""
        return ranked_tokens(self.ranking, self.counts(rule, budget))
