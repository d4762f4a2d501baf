"""From scores to the tokens that stay: rankings, allocators, and the one path that eviction,
evaluation and search share. Protection and ties are decided here alone.

Scores are ranked under a protection; an allocator turns them into counts per layer and KV head; the
best `count` tokens of every head stay. Without an allocator every head keeps the budget. One with
`AllocatorParts.pooled` first replaces the scores, so that all heads keep the same tokens.

Rankings list token indices, most important first. Ties go to the newer token. Protected tokens
(attention sinks and the most recent ones) count inside the budget and come before all others; among
themselves they alternate newest, sink 0, next newest, sink 1, ... (no paper defines this order).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, zip_longest
from typing import Any, NamedTuple, Protocol, cast, runtime_checkable

import torch
from torch import Tensor

from kvp.budgets import Budget
from kvp.errors import PolicyError, UsageError
from kvp.geometry import Geometry
from kvp.plugins import OptionalParts, class_label, instance_of, user_errors
from kvp.scoring import (
    Scorer,
    ScorerParts,
    View,
    expect_tensor,
    group_budgets,
    needs_of,
    score_layers,
    sizes_of,
)

POOLS = ("logsumexp", "mean", "max")
"""How `pooled_scores` makes one score of those of all heads."""

EMPTY_SLOT = -1
"""Index that means no token where heads keep different numbers."""

Sizes = Callable[[Tensor], Tensor]
"""Scores [L, H, N], protected tokens at +inf -> the scorer's own sizes [L, H] int64."""


@dataclass(frozen=True, kw_only=True)
class Protection:
    """Tokens that are always kept (KVP paper, appendix A.2: first 4 and last 16)."""

    sinks: int = 4
    recents: int = 16

    def __post_init__(self) -> None:
        if any(type(n) is not int or n < 0 for n in (self.sinks, self.recents)):
            raise ValueError(f"protected tokens are whole numbers, 0 or more, got {self}")

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


def pooled_scores(scores: Tensor, pool: str) -> Tensor:
    """One score per token for all heads and layers: [L, H, N] floats -> [N] float32.

    `logsumexp` adds up what heads expect where scores are logarithms, as a calibrated policy's are;
    of scores within 0 to 1 (attention, cosines) it is nearly the mean. `mean` and `max` are of the
    scores as they are. Tokens at +inf in every head (`protected_scores`) stay there.
    """
    heads = scores.flatten(0, -2)  # [A, N]
    limit = torch.finfo(torch.float32).max / 2  # above it are protected tokens alone
    values = heads.double().clamp(-limit, limit)
    if pool == "logsumexp":
        pooled = values.logsumexp(0)
    else:
        pooled = values.mean(0) if pool == "mean" else values.amax(0)
    return pooled.float().masked_fill(heads.isposinf().all(0), torch.inf)


@dataclass(frozen=True, kw_only=True)
class Request:
    """One prompt whose cache is to be shrunk."""

    scores: Tensor
    """[L, H, N] float32, higher = keep. Protected tokens are +inf; -inf is no token, in a cache
    whose heads hold different numbers of them, or the least that a scorer gives."""
    budget: int
    """Tokens per KV head on average, protected ones included, 1 <= budget <= N."""
    floor: int
    """Minimum tokens of a head: the protected ones, at least 1."""
    sizes: Tensor | None = None
    """[L, H] int64, the scorer's sizes of its own scores (`ScorerParts`), None if it has none."""

    @property
    def total(self) -> int:
        """Tokens to keep over all layers and KV heads."""
        return self.scores.shape[0] * self.scores.shape[1] * self.budget


@runtime_checkable
class Allocator(Protocol):
    """A rule that splits a budget over layers and KV heads."""

    @property
    def name(self) -> str:
        """Registered name with its options, e.g. `ada(safeguard=0.5)`."""

    def allocate(self, request: Request) -> Tensor:
        """Tokens per layer and KV head: [L, H] int64, floor <= count <= N, sum `request.total`."""


class AllocatorParts(OptionalParts):
    """What an allocator may have besides name and `allocate`, and what counts where it has not."""

    meets_budget: bool = True
    """False where its counts miss the total on purpose: sizes of a scorer, a published rounding."""
    self_sized: bool = False
    """True where it ignores the budget and takes the sizes that the scorer gives."""
    pooled: Callable[[Tensor], Tensor] | None = None
    """Replaces the scores before they are ranked: [L, H, N] with protected tokens at +inf ->
    [L, H, N], all heads equal. What it puts at +inf comes right after the protected tokens."""
    check_geometry: Callable[..., None] | None = None
    """Called with `layers` and `kv_heads` of a model; raises PolicyError for one not its own."""


def check_allocator(thing: Any, label: str, hint: str = "") -> Allocator:  # noqa: ANN401
    """Return `thing`, or one made of it if a class; UsageError where that is no allocator."""
    thing = instance_of(thing, class_label("allocator", thing))
    with user_errors(thing, label):
        if not hasattr(thing, "name") or not hasattr(thing, "allocate"):
            raise UsageError(f"{label} is no allocator: it takes name and allocate(request){hint}")
    return cast(Allocator, thing)


def check_geometry(
    scorer: Scorer | None, geometry: Geometry, allocator: Allocator | None = None
) -> None:
    """Raise PolicyError, naming both, where a policy or a budget file is of another geometry."""
    if check := AllocatorParts(allocator).check_geometry:
        check(layers=geometry.layers, kv_heads=geometry.kv_heads)
    policy = ScorerParts(scorer)
    if scorer is not None and isinstance(policy.geometry, Geometry) and policy.geometry != geometry:
        name = policy.model_name or "another model"
        raise PolicyError(
            f"policy {policy.label or scorer.name} was trained for {name}, {policy.geometry}; the "
            f"model has {geometry}: load the model that this policy was trained for, or train a "
            "policy of this one (docs/your_model.md)"
        )


def allocated_counts(allocator: Allocator, request: Request) -> Tensor:
    """Ask `allocator` and check its answer: [L, H] int64.

    Raises UsageError when the counts have another shape or type, lie outside floor..N or miss the
    total without saying so (`Allocator.allocate`), and when a user's own allocator fails.
    """
    layers, heads, tokens = request.scores.shape
    with user_errors(allocator, f"allocator {allocator.name}"):
        counts = expect_tensor(allocator.allocate(request), f"allocator {allocator.name} returned")
        if counts.shape != (layers, heads) or counts.dtype != torch.int64:
            raise UsageError(
                f"allocator {allocator.name} returned {tuple(counts.shape)} {counts.dtype}, "
                f"expected one int64 count for each of {layers} layers and {heads} KV heads"
            )
    low, high = int(counts.min()), int(counts.max())
    if low < request.floor or high > tokens:
        raise UsageError(
            f"allocator {allocator.name} gave heads {low} to {high} tokens, allowed are "
            f"{request.floor} (protected tokens, at least 1) to {tokens} (all)"
        )
    total = int(counts.sum())
    if total != request.total and AllocatorParts(allocator).meets_budget:
        raise UsageError(
            f"allocator {allocator.name} gave all heads together {total} tokens, the budget is "
            f"{request.total} (Request.total): change its counts (kvp.ranking.apportion meets a "
            "total), or give it meets_budget = False"
        )
    return counts


@dataclass(frozen=True)
class WholeBlocks:
    """Another allocator's counts in whole blocks of `size` tokens, as an engine's memory has them.

    Their sum is the other's to the nearest block, halves to an even number of blocks: largest
    remainders, ties to the first head. A head has at least the blocks of the floor, and none that
    the context would not fill.
    """

    allocator: Allocator
    size: int

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401
        """What else the other has: its name, `pooled`, `meets_budget`."""
        if name == "allocator" or name.startswith("__"):  # of a copy that is being made
            raise AttributeError(name)
        return getattr(self.allocator, name)

    def allocate(self, request: Request) -> Tensor:
        """Counts [L, H] int64, multiples of `size`; UsageError where not every floor fits."""
        counts, tokens = allocated_counts(self.allocator, request), request.scores.shape[-1]
        least, most = -(-request.floor // self.size), tokens // self.size
        if least > most:
            raise UsageError(f"{tokens} tokens have no block of {self.size} for every head")
        heads, total = counts.numel(), round(int(counts.sum()) / self.size)
        total = min(max(total, heads * least), heads * most)
        blocks = apportion(counts.double().flatten(), total, minimum=least, maximum=most)
        return blocks.view(counts.shape) * self.size


def apportion(shares: Tensor, total: int, *, minimum: int, maximum: int) -> Tensor:
    """Integers [n] in proportion to `shares` [n]: largest remainders, ties to the first.

    Their sum is `total`. Shares are float64, 0 or more, not all 0; remainders within 1e-9 tie, for
    rounded shares. Raises ValueError on others, and where `minimum` to `maximum` allow no such sum.
    """
    count = shares.shape[0]
    if not count * minimum <= total <= count * maximum:
        raise ValueError(f"{count} counts in {minimum}..{maximum} cannot sum to {total}")
    if not ((shares >= 0) & shares.isfinite()).all() or not shares.any():
        raise ValueError("shares must be finite, 0 or more, not all 0; scores may be +inf or -inf")
    shares = (shares.double() / float(shares.max())).clamp_min(1e-30)  # 0: after all others
    low, high = float(minimum), 2.0 * maximum / float(shares.min())
    while low < (scale := (low + high) / 2) < high:  # at which clamped shares sum to the total
        short = float((shares * scale).clamp(minimum, maximum).sum()) < total
        low, high = (scale, high) if short else (low, scale)
    wanted = (shares * low).clamp(minimum, maximum)
    counts = (wanted + 1e-9).floor().long()
    remainder = torch.where(counts < maximum, wanted - counts, -torch.inf)
    return counts + _mark_best(remainder, total - int(counts.sum()), within=1e-9)


def count_winners(scores: Tensor, total: int, *, guaranteed: int) -> Tensor:
    """Tokens of every head among the best `total` of all heads that compete: [C, U] int64.

    Scores [C, U, N], higher = keep, without NaN, are of C separate competitions of U heads each;
    `guaranteed` tokens of every head are kept before heads compete, and U * guaranteed <= total <=
    U * N. Ties go to the newer token, then the lower layer, then the lower head. O(C U N) memory.
    """
    competitions, heads, tokens = scores.shape
    newest_first = scores.flip(-1)
    safe = _mark_best(newest_first, guaranteed)
    open_to_all = newest_first.masked_fill(safe, -torch.inf).mT.flatten(1)
    # A safe token must not be counted twice, so it also loses every tie at -inf.
    taken = _mark_best(open_to_all, total - heads * guaranteed, allowed=~safe.mT.flatten(1))
    return guaranteed + taken.view(competitions, tokens, heads).sum(dim=1)


def _mark_best(
    scores: Tensor, count: int, *, allowed: Tensor | None = None, within: float = 0.0
) -> Tensor:
    """Mark the `count` largest along the last axis, ties to the first: [..., M] -> [..., M] bool.

    Entries that are not `allowed` ([..., M] bool) must be -inf and are never marked. Those that are
    `within` this of the last one marked tie with it.
    """
    if count == 0:
        return torch.zeros_like(scores, dtype=torch.bool)
    limit = scores.kthvalue(scores.shape[-1] - count + 1, dim=-1, keepdim=True).values
    above = scores > limit + within
    ties = (scores >= limit - within) & ~above
    if allowed is not None:
        ties &= allowed
    missing = count - above.sum(dim=-1, keepdim=True)
    return above | (ties & (ties.cumsum(dim=-1) <= missing))


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
