"""From scores to the tokens that stay, the one path that eviction, evaluation and search share.

Scores are ranked under a protection; an allocator turns them into counts per layer and KV head; the
best `count` tokens of every head stay.

Rankings list token indices, most important first. Ties go to the newer token. Protected tokens come
before all others; among themselves they alternate newest, sink 0, next newest, sink 1, ... (no
paper defines this order).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property
from itertools import chain, zip_longest
from typing import NamedTuple

import torch
from torch import Tensor

from kvp.allocation import Allocator, AllocatorParts, Request, Sizes, allocated_counts
from kvp.errors import UsageError
from kvp.plugins import user_errors
from kvp.protection import UNPROTECTED, Protection, protected_scores
from kvp.scoring import Scorer, View, expect_tensor, group_budgets, needs_of, score_layers, sizes_of

EMPTY_SLOT = -1
"""Index that means no token where heads keep different numbers."""


def rank_tokens(scores: Tensor, protection: Protection = UNPROTECTED) -> Tensor:
    """Rank tokens by descending score: [..., N] floats -> [..., N] int64 token indices."""
    tokens = scores.shape[-1]
    # Newest first: a stable sort then puts the newer of equal tokens first.
    newest_first = protected_scores(scores, protection).flip(-1)
    ranking = tokens - 1 - newest_first.argsort(dim=-1, descending=True, stable=True)
    recents = range(tokens - 1, max(tokens - protection.recents, 0) - 1, -1)
    sinks = range(min(protection.sinks, tokens))
    alternating = dict.fromkeys(chain.from_iterable(zip_longest(recents, sinks)))
    order = [token for token in alternating if token is not None]
    ranking[..., : len(order)] = torch.tensor(order, dtype=torch.int64, device=scores.device)
    return ranking


class Selection:
    """One prompt's tokens, ranked under one protection; serves every allocator and budget."""

    def __init__(self, scores: Tensor, protection: Protection, sizes: Sizes | None = None) -> None:
        """Rank scores [L, H, N], higher = keep; more leading axes where there is no allocator."""
        self._scores, self._protection, self._sizes = scores, protection, sizes
        self._pooled: list[tuple[Allocator, Selection]] = []

    @cached_property
    def ranking(self) -> Tensor:
        """[L, H, N] int64 token indices, most important first."""
        return rank_tokens(self._scores, self._protection)

    @property
    def _protected_scores(self) -> Tensor:
        return protected_scores(self._scores, self._protection)  # a copy, to be written to

    def _pool_by(self, allocator: Allocator | None) -> Selection:
        """The selection by the scores that an allocator pools; this one for others."""
        if allocator is None or (pool := AllocatorParts(allocator).pooled) is None:
            return self
        for known, selection in self._pooled:
            if known is allocator:
                return selection
        with user_errors(pool, f"allocator {allocator.name}"):
            what = f"allocator {allocator.name} pooled scores"
            scores = expect_tensor(pool(self._protected_scores), f"{what} to")
            if scores.shape != (shape := self._scores.shape):
                change = f"{tuple(shape)} to {tuple(scores.shape)}"
                raise UsageError(f"{what} {change}, expected the same shape")
            if bool(scores.isnan().any()):
                raise UsageError(f"{what} to NaN")
            if bool((scores != scores[:1, :1]).any()):
                raise UsageError(f"{what} that differ between heads")
        self._pooled.append((allocator, Selection(scores, self._protection)))
        return self._pooled[-1][1]

    def counts(self, budget: int, allocator: Allocator | None = None) -> Tensor:
        """Tokens per layer and KV head at `budget`: [L, H] int64; UsageError on unusable counts."""
        *heads, tokens = self._scores.shape
        if allocator is None:
            return torch.full(heads, min(budget, tokens), device=self._scores.device)
        pooled = self._pool_by(allocator)
        request = Request(
            scores=pooled._protected_scores,
            budget=min(budget, tokens),
            floor=max(1, min(self._protection.tokens, tokens)),
            sizes=self._sizes and self._sizes(self._protected_scores),
        )
        return allocated_counts(allocator, request)

    def tokens(self, budget: int, allocator: Allocator | None = None) -> Tensor:
        """Tokens that stay: [L, H, S] int64, ascending, then -1; UsageError on unusable counts."""
        return self._pool_by(allocator).tokens_of(self.counts(budget, allocator))

    def tokens_of(self, counts: Tensor) -> Tensor:
        """The first `counts` [L, H] tokens of every head, as `tokens`."""
        counts = counts.to(self.ranking.device)
        width, tokens = int(counts.max()), self.ranking.shape[-1]
        beyond = torch.arange(width, device=counts.device) >= counts[..., None]
        best = self.ranking[..., :width].masked_fill(beyond, tokens)  # [L, H, width]
        ordered = best.sort(dim=-1).values
        return ordered.masked_fill(ordered == tokens, EMPTY_SLOT)


class Choice(NamedTuple):
    """How many tokens each KV head keeps of a prompt, and which come first."""

    budget: int
    protection: Protection
    allocator: Allocator | None = None


def select_tokens(
    views: Callable[[int], Iterable[View]], scorer: Scorer, choice: Choice
) -> list[Tensor]:
    """The tokens that stay by one choice: [L, H, S] for every prompt (`score_and_select`)."""
    ((_, tokens),) = score_and_select(views, scorer, [choice])
    return tokens


@torch.no_grad()
def score_and_select(
    views: Callable[[int], Iterable[View]], scorer: Scorer, choices: Sequence[Choice]
) -> Iterator[tuple[int, list[Tensor]]]:
    """The number of each choice, and the tokens that stay by it: [L, H, S] for every prompt.

    `views` makes those of all layers at a budget. It is called once for all choices, or, where the
    scorer reads the budget, once for each. Raises UsageError for unusable scores and counts.
    """
    sizes = sizes_of(scorer)
    for budgets in group_budgets(needs_of(scorer), sorted({choice.budget for choice in choices})):
        scores = score_layers(scorer, views(budgets[0]))
        device = scores[0].device  # layers may lie on several devices
        prompts = torch.stack([layer.to(device) for layer in scores], dim=1)  # [B, L, H, N]
        selections: dict[Protection, list[Selection]] = {}
        for number, (budget, protection, allocator) in enumerate(choices):
            if budget not in budgets:
                continue
            if protection not in selections:
                selections[protection] = [Selection(one, protection, sizes) for one in prompts]
            yield number, [one.tokens(budget, allocator) for one in selections[protection]]
