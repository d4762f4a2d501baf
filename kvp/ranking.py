"""From scores to rankings and kept tokens: protection and ties are decided here alone; and the
Plackett-Luce policy that draws rankings (KVP paper, section 3.1, equations 2 and 3).

Rankings list token indices, most important first. Ties go to the newer token. Protected tokens
(attention sinks and the most recent ones) count inside the budget and come before all others; among
themselves they alternate newest, sink 0, next newest, sink 1, ... (no paper defines this order).

The policy draws rankings of the N tokens of one context: the first token with probability
proportional to exp(score), the second among the rest, and so on.
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


def log_prob(scores: Tensor, ranking: Tensor) -> Tensor:
    """Log-probability of rankings: sum_i [s_{σ_i} - logsumexp_{j>=i} s_{σ_j}] (equation 2), O(N).

    Args:
        scores: [..., N] float; half precision is computed in float32. Differentiable.
        ranking: [..., N] int64 token indices, most important first; extra leading axes (samples)
            broadcast over the scores.

    Returns:
        [...] natural-log probabilities, one per ranking.

    Raises:
        TypeError: a dtype is wrong.
        ValueError: the token axes differ.
    """
    _check_scores(scores)
    if ranking.dtype != torch.int64:
        raise TypeError(f"a ranking holds int64 token indices, got {ranking.dtype}")
    if ranking.shape[-1] != scores.shape[-1]:
        raise ValueError(f"{ranking.shape[-1]} ranked tokens for {scores.shape[-1]} scores")
    ranked = _single(scores).expand(ranking.shape).gather(-1, ranking)
    log_rest = ranked.flip(-1).logcumsumexp(-1).flip(-1)
    return (ranked - log_rest).sum(-1)


@torch.no_grad()
def gumbel_sort(
    scores: Tensor,
    samples: int,
    generator: torch.Generator | None = None,
    *,
    shard: slice | None = None,
    of: int | None = None,
) -> Tensor:
    """Draw rankings: sort s_i + g_i in descending order, g_i ~ Gumbel(0, 1) (equation 3).

    With `shard` and `of` the scores are those of the heads `shard` among `of` heads: the noise of
    all heads is drawn, so that a shard gets the rankings that the whole model would give it.

    Args:
        scores: [..., N] float; half precision is computed in float32.
        samples: K >= 1, rankings per context.
        generator: source of the noise; the noise is drawn on the generator's device.
        shard: indices on the first axis of the scores [A, N] among the heads of the model.
        of: heads of the model.

    Returns:
        [K, ..., N] int64 token indices, most important first, independent over K.

    Raises:
        TypeError: the dtype is wrong.
        ValueError: K < 1, the scores have no token axis, or they are not those of the shard.
    """
    _check_scores(scores)
    if samples < 1:
        raise ValueError(f"cannot draw {samples} rankings")
    shape = scores.shape if of is None else (of, *scores.shape[1:])
    noise = gumbel_noise((samples, *shape), scores.device, generator)  # [K, ..., N]
    noise = noise if shard is None else noise[:, shard]
    if noise.shape[1:] != scores.shape:
        raise ValueError(f"scores {tuple(scores.shape)} are not those of {shard} of {of} heads")
    return (_single(scores) + noise).argsort(dim=-1, descending=True)


def gumbel_noise(
    shape: tuple[int, ...], device: torch.device, generator: torch.Generator | None = None
) -> Tensor:
    """Draw float32 Gumbel(0, 1) noise, on the generator's device, and move it to `device`.

    It is minus the log of a unit exponential, which keeps its upper tail in float32 (-log(-log u)
    of a float32 uniform cannot exceed 16).
    """
    source = device if generator is None else generator.device
    unit = torch.empty(shape, device=source).exponential_(generator=generator)
    return -unit.clamp_min(torch.finfo(unit.dtype).tiny).log().to(device)


def _check_scores(scores: Tensor) -> None:
    if not scores.is_floating_point():
        raise TypeError(f"scores must be floating point, got {scores.dtype}")
    if scores.ndim < 1:
        raise ValueError("scores need a token axis")


def _single(scores: Tensor) -> Tensor:
    """At least float32: half-precision scores would tie."""
    return scores if scores.dtype == torch.float64 else scores.float()
