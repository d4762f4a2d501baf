"""Splitting a budget over the heads of a model: the contract of allocators, and its arithmetic.

An allocator turns the scores of one prompt into token counts per layer and KV head; the
scores alone decide which tokens (`kvp.ranking`). The list of allocators is `kvp.known_names`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from kvp.errors import UsageError
from kvp.plugins import own_errors
from kvp.ranking import Protection, rank_tokens

EMPTY_SLOT = -1
"""Index that means no token where heads keep different numbers."""


@dataclass(frozen=True, kw_only=True)
class Request:
    """One prompt whose cache is to be shrunk."""

    scores: Tensor
    """[L, H, N] float32, higher = keep; protected tokens are +inf."""
    budget: int
    """Tokens per KV head on average, protected ones included, 1 <= budget <= N."""
    floor: int
    """Minimum tokens of a head: the protected ones, at least 1."""
    sizes: Tensor | None = None
    """[L, H] int64, the scorer's sizes (`kvp.scoring.SelfSizing`), None if it has none."""

    @property
    def total(self) -> int:
        """Tokens to keep over all layers and KV heads."""
        layers, heads, _ = self.scores.shape
        return layers * heads * self.budget


@runtime_checkable
class Allocator(Protocol):
    """A rule that splits a budget over layers and KV heads."""

    @property
    def name(self) -> str:
        """Registered name with its options, e.g. `ada(safeguard=0.5)`."""
        ...

    def allocate(self, request: Request) -> Tensor:
        """Tokens per layer and KV head: [L, H] int64, floor <= count <= N, sum `request.total`.

        A rule that misses the sum on purpose (it sizes the cache itself, or reproduces a published
        rounding) has the attribute `meets_budget = False`.
        """
        ...


def allocated_counts(allocator: Allocator, request: Request) -> Tensor:
    """Ask `allocator` and check its answer: [L, H] int64.

    Raises UsageError when the counts have another shape or type, lie outside floor..N or miss the
    total without saying so (`Allocator.allocate`), and when a user's own allocator fails.
    """
    layers, heads, tokens = request.scores.shape
    with own_errors(allocator, f"allocator {allocator.name}"):
        counts = allocator.allocate(request)
    if not isinstance(counts, Tensor):
        raise UsageError(f"allocator {allocator.name} returned {type(counts).__name__}, no tensor")
    if counts.shape != (layers, heads) or counts.dtype != torch.int64:
        raise UsageError(
            f"allocator {allocator.name} returned {tuple(counts.shape)} {counts.dtype}, expected "
            f"one int64 count for each of {layers} layers and {heads} KV heads"
        )
    low, high = int(counts.min()), int(counts.max())
    if low < request.floor or high > tokens:
        raise UsageError(
            f"allocator {allocator.name} gave heads {low} to {high} tokens, allowed are "
            f"{request.floor} (protected tokens, at least 1) to {tokens} (all)"
        )
    total = int(counts.sum())
    if total != request.total and getattr(allocator, "meets_budget", True):
        raise UsageError(
            f"allocator {allocator.name} gave all heads together {total} tokens, the budget is "
            f"{request.total} (Request.total): change its counts (kvp.allocation.apportion meets a "
            "total), or give it meets_budget = False"
        )
    return counts


def apportion(shares: Tensor, total: int, *, minimum: int, maximum: int) -> Tensor:
    """Integers in proportion to `shares` with an exact sum: largest remainders, ties to the first.

    Args:
        shares: [n] non-negative float64, not all 0.
        total: sum to reach, n * minimum <= total <= n * maximum.
        minimum: smallest allowed count.
        maximum: largest allowed count.

    Returns:
        [n] int64. Raises ValueError when the bounds leave no solution.
    """
    count = shares.shape[0]
    if not count * minimum <= total <= count * maximum:
        raise ValueError(f"{count} counts in {minimum}..{maximum} cannot sum to {total}")
    shares = shares.double()
    shares = shares.clamp_min(1e-9 * float(shares.max()))
    low, high = 0.0, 2.0 * maximum / float(shares.min())
    for _ in range(200):  # the scale at which the clamped shares sum to the total
        scale = (low + high) / 2
        if float((shares * scale).clamp(minimum, maximum).sum()) < total:
            low = scale
        else:
            high = scale
    wanted = (shares * low).clamp(minimum, maximum)
    counts = (wanted + 1e-9).floor().long()
    missing = total - int(counts.sum())
    remainder = torch.where(counts < maximum, wanted - counts, -torch.inf)
    order = remainder.argsort(descending=True, stable=True)
    counts[order[:missing]] += 1
    return counts


def protected_scores(scores: Tensor, protection: Protection) -> Tensor:
    """Scores [..., N] with protected tokens raised to +inf, everything else below."""
    tokens = scores.shape[-1]
    raised = scores.float().clamp(max=torch.finfo(torch.float32).max)
    raised[..., : min(protection.sinks, tokens)] = torch.inf
    raised[..., max(tokens - protection.recents, 0) :] = torch.inf
    return raised


def allocated_tokens(scores: Tensor, counts: Tensor, protection: Protection) -> Tensor:
    """The best `counts` [L, H] tokens of every head by scores [L, H, N].

    Returns:
        [L, H, max count] int64 indices, ascending per head, `EMPTY_SLOT` after a head's last one.
    """
    return ranked_tokens(rank_tokens(scores, protection), counts)


def ranked_tokens(ranking: Tensor, counts: Tensor) -> Tensor:
    """The first `counts` [L, H] tokens of every head's ranking [L, H, N], as `allocated_tokens`."""
    counts = counts.to(ranking.device)
    width = int(counts.max())
    best = ranking[..., :width]  # [L, H, width]
    tokens = ranking.shape[-1]
    beyond = torch.arange(width, device=ranking.device) >= counts[..., None]
    ordered = best.masked_fill(beyond, tokens).sort(dim=-1).values
    return ordered.masked_fill(ordered == tokens, EMPTY_SLOT)
