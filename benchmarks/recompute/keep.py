"""From scores to the tokens that stay: budgets, protection, and heads that compete.

Higher scores stay; of equal scores the newer token does, then the lower layer, then the lower head.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from decimal import ROUND_HALF_UP, Decimal
from typing import Any

import numpy as np
import torch
from scipy import optimize
from torch import Tensor

ALLOCATORS: Mapping[str, Mapping[str, Any]] = {
    "uniform": {},
    "ada": {"safeguard": 0.2},
    "global": {"safeguard": 0.2},
    "pyramid": {"beta": 20.0, "window": 8},
}
"""Rules that can be computed again -> their options and defaults."""
ALLOCATOR_PRESETS: Mapping[str, Mapping[str, Mapping[str, Any]]] = {
    "global": {"kvzip": {"safeguard": 0.0}},
}
"""Published settings of a rule, by name."""


def budget_tokens(spec: str, cached: int, protected: int) -> int:
    """Tokens per KV head that a budget keeps: a share rounds half up, protection is inside."""
    if not spec.endswith("%"):
        return min(int(spec), cached)
    share = Decimal(spec[:-1]) * cached / 100
    rounded = int(share.quantize(Decimal(1), rounding=ROUND_HALF_UP))
    return min(max(rounded, protected, 1), cached)


def kept_tokens(
    scores: Sequence[Tensor],
    budget: int,
    *,
    sinks: int,
    recents: int,
    allocator: str,
    options: Mapping[str, Any],
) -> list[Tensor]:
    """Per layer [H, N] bool, whether a token stays, from scores [H, N] of every layer."""
    heads = [(layer, head) for layer, of in enumerate(scores) for head in range(len(of))]
    tokens = scores[0].shape[1]
    protected = {*range(min(sinks, tokens)), *range(max(tokens - recents, 0), tokens)}
    ranked: dict[tuple[int, int], list[tuple[float, int]]] = {}
    for layer, head in heads:
        of_tokens = scores[layer][head].tolist()
        for token in protected:
            of_tokens[token] = math.inf
        pairs = [(-score, -token) for token, score in enumerate(of_tokens)]
        ranked[layer, head] = sorted(pairs)
    if allocator == "uniform":
        counts = dict.fromkeys(heads, budget)
    elif allocator == "pyramid":
        by_layer = _pyramid(len(scores), budget, tokens, max(len(protected), 1), **options)
        counts = {head: by_layer[head[0]] for head in heads}
    else:
        own = max(int(options["safeguard"] * budget), len(protected), 1)
        layers = range(len(scores))
        groups = [heads] if allocator == "global" else [_of(layer, heads) for layer in layers]
        counts = {}
        for group in groups:
            counts.update(_won({head: ranked[head] for head in group}, budget * len(group), own))
    kept = [torch.zeros(of.shape).bool() for of in scores]
    for (layer, head), count in counts.items():
        for _, token in ranked[layer, head][:count]:
            kept[layer][head, -token] = True
    return kept


def _pyramid(
    layers: int, budget: int, tokens: int, least: int, *, beta: float, window: int
) -> list[int]:
    """Tokens of each layer: on a falling line within `least` and `tokens`, `budget` on average.

    What the bounds take away is scaled back on to the others; integers by largest remainder.
    """
    inside = min(window, budget)
    high = min(2 * (budget - inside) - (budget - inside) / beta, tokens - inside)
    low = 2 * (budget - inside) - high
    line = inside + np.linspace(high, low, layers) if layers > 1 else np.array([float(budget)])
    total = layers * budget

    def missed(scale: float) -> float:
        return float(np.clip(scale * line, least, tokens).sum()) - total

    most = tokens / max(line.min(), 1e-9)
    scale = optimize.brentq(missed, 0, most, xtol=1e-15) if missed(1.0) else 1.0
    wanted = np.clip(scale * line, least, tokens)
    counts = np.floor(wanted + 1e-7).astype(int)
    rest = np.where(counts < tokens, wanted - counts, -1)
    for layer in np.argsort(-rest, kind="stable")[: total - counts.sum()]:
        counts[layer] += 1
    return [int(count) for count in counts]


def _of(layer: int, heads: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    return [head for head in heads if head[0] == layer]


def _won(
    ranked: Mapping[tuple[int, int], list[tuple[float, int]]], total: int, own: int
) -> dict[tuple[int, int], int]:
    """Tokens of each head: the best `own` of it, and what it wins of all others."""
    others = sorted(
        (score, token, head) for head, pairs in ranked.items() for score, token in pairs[own:]
    )
    counts = dict.fromkeys(ranked, own)
    for _, _, head in others[: total - own * len(ranked)]:
        counts[head] += 1
    return counts
