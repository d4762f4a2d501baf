"""From scores to rankings and kept tokens: protection and ties are decided here alone.

Rankings list token indices, most important first. Ties go to the newer token. Protected tokens
(attention sinks and the most recent ones) count inside the budget and come before all others; among
themselves they alternate newest, sink 0, next newest, sink 1, ... (no paper defines this order).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Protection:
    """Tokens that are always kept (KVP paper, appendix A.2: first 4 and last 16)."""

    sinks: int = 4
    """First tokens of the cache."""
    recents: int = 16
    """Most recent tokens of the cache."""

    def __post_init__(self) -> None:
        """Raise ValueError on negative counts."""
        if self.sinks < 0 or self.recents < 0:
            raise ValueError(f"protected tokens cannot be negative, got {self}")

    @property
    def tokens(self) -> int:
        """Protected tokens of a cache that is longer than both windows together."""
        return self.sinks + self.recents

    def competing(self, tokens: int) -> slice:
        """Where the tokens that are not protected lie in a cache of `tokens`; may be empty."""
        return slice(self.sinks, max(tokens - self.recents, self.sinks))


UNPROTECTED = Protection(sinks=0, recents=0)


def protected_order(tokens: int, protection: Protection) -> list[int]:
    """Indices of the protected tokens of a cache of `tokens`, in their fixed order."""
    recents = list(range(tokens - 1, max(tokens - protection.recents, 0) - 1, -1))
    sinks = list(range(min(protection.sinks, tokens)))
    order: list[int] = []
    for step in range(max(len(recents), len(sinks))):
        order += recents[step : step + 1] + sinks[step : step + 1]
    return list(dict.fromkeys(order))


def rank_tokens(scores: Tensor, protection: Protection = UNPROTECTED) -> Tensor:
    """Rank tokens by descending score: [..., N] floats -> [..., N] int64 token indices."""
    tokens = scores.shape[-1]
    adjusted = scores.float().clamp(max=torch.finfo(torch.float32).max)  # inf is for protection
    order = protected_order(tokens, protection)
    if order:
        index = torch.tensor(order, device=scores.device)
        adjusted[..., index] = torch.inf
    newest_first = adjusted.flip(-1)  # a stable sort then puts the newer of equal tokens first
    ranking = tokens - 1 - newest_first.argsort(dim=-1, descending=True, stable=True)
    if order:
        ranking[..., : len(order)] = index
    return ranking


def keep_tokens(scores: Tensor, budget: int, protection: Protection = UNPROTECTED) -> Tensor:
    """Keep the best `budget` tokens: [..., N] floats -> [..., min(budget, N)] ascending indices."""
    return rank_tokens(scores, protection)[..., :budget].sort(dim=-1).values
