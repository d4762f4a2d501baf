"""The Plackett-Luce policy over rankings (KVP paper, section 3.1, equations 2 and 3).

A policy draws rankings of the N tokens of one context: the first token with probability
proportional to exp(score), the second among the rest, and so on. Left out: where scores come from
(`policies`), the reward of a ranking (`kvp.reward`), and padding: a context has real tokens only.
"""

from __future__ import annotations

import torch
from torch import Tensor


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
    _check(scores)
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
    _check(scores)
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


def _check(scores: Tensor) -> None:
    if not scores.is_floating_point():
        raise TypeError(f"scores must be floating point, got {scores.dtype}")
    if scores.ndim < 1:
        raise ValueError("scores need a token axis")


def _single(scores: Tensor) -> Tensor:
    """At least float32: half-precision scores would tie."""
    return scores if scores.dtype == torch.float64 else scores.float()
