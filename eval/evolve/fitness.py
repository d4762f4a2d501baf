"""Fitness of a candidate: EvolKV, its fitness equation and cache score (section 3)."""

from __future__ import annotations

import math

MIN_SCORE = 1e-6
"""A task score of 0 counts as this, so that the cache score still orders useless candidates."""


def cache_score(mean: float, target: float, gamma: float) -> float:
    """Score of a mean budget against its target, both tokens per KV head.

    max(0, 1 - (mean - target) / target) above the target, 1 - gamma (1 - mean / target) below.
    """
    if mean > target:
        return max(0.0, 1.0 - (mean - target) / target)
    return 1.0 - gamma * (1.0 - mean / target)


def fitness(score: float, mean: float, target: float, *, lambda_: float, gamma: float) -> float:
    """Fitness r = f (1 + lambda cache_score): f is the mean task score, 0 to 1."""
    return max(score, MIN_SCORE) * (1.0 + lambda_ * cache_score(mean, target, gamma))


def reply_score(nll: float, tokens: int) -> float:
    """Task score of a given reply: 1 / perplexity, the geometric mean of its tokens' probabilities.

    `nll` is summed over the reply's tokens, in nats. The paper only has generated answers.
    """
    return math.exp(-nll / tokens)
