"""Tokens that are always kept, and what a budget is beside them.

Protected tokens (attention sinks and the most recent ones) count inside the budget.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from kvp.bounds import NotNegative
from kvp.budgets import Budget
from kvp.errors import UsageError
from kvp.field_checks import check_fields


@dataclass(frozen=True, kw_only=True)
class Protection:
    """Tokens that are always kept (KVP paper, appendix A.2: first 4 and last 16)."""

    sinks: NotNegative = 4
    recents: NotNegative = 16

    def __post_init__(self) -> None:
        check_fields(self)

    @property
    def tokens(self) -> int:
        """Protected tokens of a cache that is longer than both windows together."""
        return self.sinks + self.recents

    def competing(self, tokens: int) -> slice:
        """Where the tokens that are not protected lie in a cache of `tokens`; may be empty."""
        return slice(self.sinks, max(tokens - self.recents, self.sinks))


UNPROTECTED = Protection(sinks=0, recents=0)


def protection_of(value: Protection | str | None) -> Protection:
    """Itself, or as `--protection` has it: "on" (or None), "off"; UsageError for anything else."""
    if isinstance(value, Protection):
        return value
    if value in (None, "on", "off"):
        return UNPROTECTED if value == "off" else Protection()
    raise UsageError(
        f'protection={value!r} is neither "on", "off" nor a Protection(sinks=..., recents=...)'
    )


def protected_scores(scores: Tensor, protection: Protection) -> Tensor:
    """Scores [..., N] with protected tokens raised to +inf, everything else below."""
    tokens = scores.shape[-1]
    raised = scores.float().clamp(max=torch.finfo(torch.float32).max)  # inf is for protection
    raised[..., : min(protection.sinks, tokens)] = torch.inf
    raised[..., max(tokens - protection.recents, 0) :] = torch.inf
    return raised


def budget_tokens(budget: Budget, cached: int, protection: Protection) -> int:
    """Tokens per KV head that `budget` is of `cached` ones; a count may be more than these.

    A percentage is never fewer than the protected tokens, so that a short prompt among long ones
    stops nothing. Raises UsageError for a token count below them.
    """
    if budget.count is not None and budget.count < min(protection.tokens, cached):
        raise UsageError(
            f"budget {budget} keeps {budget} tokens, fewer than the {protection.tokens} protected "
            "ones (a percentage keeps these): raise the budget or turn protection off"
        )
    return max(budget.tokens(cached), protection.tokens)


def check_budget(budget: Budget, protection: Protection) -> None:
    """Raise UsageError for a token count below the protected tokens."""
    budget_tokens(budget, protection.tokens, protection)


def kept_tokens(budget: Budget, cached: int, protection: Protection) -> int:
    """Tokens per KV head that stay of `cached` ones: `budget_tokens`, at most all of them."""
    return min(budget_tokens(budget, cached, protection), cached)
