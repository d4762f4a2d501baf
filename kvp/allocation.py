"""Allocators: from scores and a budget to counts per layer and KV head.

Without an allocator every head keeps the budget. One with `AllocatorParts.pooled` first replaces
the scores, so that all heads keep the same tokens.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, Protocol, cast, runtime_checkable

import torch
from torch import Tensor

from kvp.errors import PolicyError, UsageError
from kvp.geometry import Geometry
from kvp.plugins import OptionalParts, class_label, instance_of, user_errors
from kvp.scoring import Scorer, ScorerParts, expect_tensor

Pool = Literal["logsumexp", "mean", "max"]
"""How `pooled_scores` makes one score of those of all heads."""

Sizes = Callable[[Tensor], Tensor]
"""Scores [L, H, N], protected tokens at +inf -> the scorer's own sizes [L, H] int64."""


def pooled_scores(scores: Tensor, pool: Pool) -> Tensor:
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


def check_fits_model(
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
            f"{request.total} (Request.total): change its counts (kvp.allocation.apportion meets a "
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
