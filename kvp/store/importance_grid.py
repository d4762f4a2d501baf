"""The importance grid: how much attention every token receives, interval by interval of queries.

A store without queries keeps it instead. Attention from the queries between two neighbouring edges
is a sum of its own (`kvp.ops.future_attention.grid_attention`), so the future attention of a cut at
an edge is the sum of the rows from there on: nothing is subtracted, and no small number drowns in a
large one (docs/decisions/0014). The largest attention, which calibration needs, is kept for a few
cuts only.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

from kvp.ops.future_attention import max_future_attention

PEAK_ROWS = 4
"""Cuts whose largest attention is kept: both boundaries, the one nearest to the middle, the last.

So wherever a sequence is long enough to be cut, a calibration has a cut to look at."""

_LARGEST = 65_504
"""Largest finite float16."""


def grid_edges(length: int, boundaries: Sequence[int], cuts: int) -> tuple[int, ...]:
    """Edges of a sequence's grid: at most `cuts` possible cuts, ascending, then its end.

    Cuts are evenly spaced, but every boundary inside the sequence is one exactly: the nearest of
    the others makes room. Needs as many cuts as boundaries; a sequence of at most `cuts` tokens is
    cut everywhere.
    """
    count = min(cuts, length - 1)
    even = [length * (place + 1) // (count + 1) for place in range(count)]
    exact = sorted({boundary for boundary in boundaries if 0 < boundary < length})
    for number, boundary in enumerate(exact):
        free = [cut for cut in even if cut not in exact[:number]]
        even[even.index(min(free, key=lambda cut: abs(cut - boundary)))] = boundary
    return (*sorted(even), length)


def peak_edges(edges: Sequence[int], boundaries: Sequence[int]) -> tuple[int, ...]:
    """The cuts of a grid at which the largest attention is kept: `PEAK_ROWS` at most."""
    cuts = edges[:-1]
    middle = sorted(cuts, key=lambda cut: abs(cut - edges[-1] // 2))[:1]
    return tuple(sorted({*middle, *cuts[-1:], *(cut for cut in cuts if cut in boundaries)}))


def rows_between(edges: Sequence[int], cut: int, stop: int) -> slice:
    """Rows of a grid that hold the queries cut <= j < stop.

    A `stop` between two edges counts as the later one. Raises ValueError for a cut that is no edge.
    """
    if cut not in edges[:-1]:
        raise ValueError(f"{cut} is no cut of the importance grid")
    last = next((place for place, edge in enumerate(edges) if edge >= stop), len(edges) - 1)
    return slice(edges.index(cut), last)


def peak_rows(queries: Tensor, keys: Tensor, edges: Sequence[int]) -> Tensor:
    """The largest attention of any query of each interval, as `grid_attention` sums it.

    Args:
        queries: [..., G, T, D] after RoPE.
        keys: [..., T, D] after RoPE.
        edges: cuts (`peak_edges`), then T.

    Returns:
        [..., len(edges) - 1, T] float32; 0 for tokens after a row's cut.
    """
    shape = (*keys.shape[:-2], len(edges) - 1, edges[-1])
    rows = torch.zeros(shape, dtype=torch.float32, device=keys.device)
    for row, (cut, stop) in enumerate(pairwise(edges)):
        rows[..., row, :cut] = max_future_attention(queries, keys, cut, stop)
    return rows


def root_scale(max_tokens: int) -> float:
    """Power of two that square roots are multiplied by in float16.

    The largest for which the attention of `max_tokens` queries does not overflow.
    """
    return 2.0 ** math.floor(math.log2(_LARGEST / math.sqrt(max_tokens)))


def encode(rows: Tensor, dtype: torch.dtype, scale: float) -> Tensor:
    """Rows of a grid as they are stored: float32 as they are, float16 as `scale` times the root.

    Roots halve the exponents, so float16 holds attention down to 1e-17 of the largest possible with
    a relative error below 1e-3; without them that would end at 1e-9.
    """
    return rows if dtype == torch.float32 else (rows.sqrt() * scale).to(dtype)


def decode(stored: Tensor, scale: float) -> Tensor:
    """Inverse of `encode`, float32."""
    return stored if stored.dtype == torch.float32 else (stored.float() / scale).square()
