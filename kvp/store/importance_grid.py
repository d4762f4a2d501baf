"""The importance grid: how much attention every token receives, interval by interval of queries.

A store without queries keeps it instead. The queries between two neighbouring edges are an interval
of their own, so a label at an edge comes from the intervals from there on: their sum or their
largest, and nothing is subtracted, so that no small number drowns in a large one
(docs/decisions.md#importance-grids). The labels asked for are kept at every point of the grid, the
others, which evaluation and calibration need, at a few.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

from kvp.ops.future_attention import grid_attention, max_grid_attention
from kvp.store.replies import READING, written_windows
from kvp.store.schema import GRIDS, SequenceRecord, Trace

_LARGEST = 65_504
"""Largest finite float16."""


def grid_edges(length: int, boundaries: Sequence[int], points: int) -> tuple[int, ...]:
    """Edges of a sequence's grid: at most `points` compression points, ascending, then its end.

    Points are evenly spaced, but every boundary inside the sequence is one exactly, in place of the
    nearest other. Needs as many points as boundaries; in a sequence of at most `points` tokens
    every token is one.
    """
    count = min(points, length - 1)
    even = [length * (index + 1) // (count + 1) for index in range(count)]
    exact = sorted({boundary for boundary in boundaries if 0 < boundary < length})
    for number, boundary in enumerate(exact):
        free = [point for point in even if point not in exact[:number]]
        even[even.index(min(free, key=lambda point: abs(point - boundary)))] = boundary
    return (*sorted(even), length)


def edges_of(
    length: int, context_length: int, prompt_length: int, points: int
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """`grid_edges` and `common_edges` of a sequence with these boundaries, as stores keep them."""
    boundaries = (prompt_length - 1, context_length)
    edges = grid_edges(length, boundaries, points)
    return edges, common_edges(edges, boundaries)


def common_edges(edges: Sequence[int], boundaries: Sequence[int]) -> tuple[int, ...]:
    """Points of a grid at which every label is kept: both boundaries, the middle, the last.

    At most `COMMON_POINTS`. So wherever a sequence can be compressed, a calibration has a point.
    """
    points = edges[:-1]
    middle = sorted(points, key=lambda point: abs(point - edges[-1] // 2))[:1]
    exact = (point for point in points if point in boundaries)
    return tuple(sorted({*middle, *points[-1:], *exact}))


def intervals_between(edges: Sequence[int], point: int, stop: int) -> slice:
    """Intervals of a grid that hold the queries point <= j < stop.

    A `stop` between two edges counts as the later one. Raises ValueError where
    `point` is no edge.
    """
    if point not in edges[:-1]:
        raise ValueError(f"{point} is no compression point of the importance grid")
    last = next((index for index, edge in enumerate(edges) if edge >= stop), len(edges) - 1)
    return slice(edges.index(point), last)


@torch.no_grad()
def label_grids(
    queries: Tensor, keys: Tensor, record: SequenceRecord, labels: Sequence[str]
) -> dict[str, Tensor]:
    """The grids of all labels of a sequence: `labels` at all points, others at the common ones.

    Args:
        queries: [..., G, T, D] after RoPE.
        keys: [..., T, D] after RoPE.
        record: its edges and the spans of its replies.
        labels: some of `GRIDS`.

    Returns:
        Label -> [..., intervals, T] float32, 0 for tokens from an interval's start on: per interval
        the sum over its queries (future_attention), the largest (max_future_attention), or the
        largest where queries that write no reply count `READING` (max_reply_attention).
    """
    written = written_windows(record.reply_spans, record.edges[0], record.length)
    parts = sorted({*record.edges, *(bound for window in written for bound in window)})
    largest = max_grid_attention(queries, keys, parts)  # [..., parts, T]
    writing = [any(a <= start < b for a, b in written) for start in parts[:-1]]
    weights = torch.tensor([1.0 if one else READING for one in writing], device=keys.device)
    grids = {}
    for label in GRIDS:
        edges = record.edges if label in labels else (*record.common_edges, record.length)
        if label == "future_attention":
            grid = grid_attention(queries, keys, edges)
        else:
            counted = largest * weights[:, None] if label == "max_reply_attention" else largest
            bounds = pairwise(parts.index(edge) for edge in edges)
            grid = torch.stack([counted[..., a:b, :].amax(-2) for a, b in bounds], dim=-2)
        for interval, start in enumerate(edges[:-1]):
            grid[..., interval, start:] = 0
        grids[label] = grid
    return grids


def importance_of(
    label: str, intervals: Tensor, spans: Sequence[tuple[int, int]], first: int, stop: int
) -> Tensor:
    """A label [..., N] from the intervals [..., intervals, N] of the queries first <= j < stop.

    `spans` are the sequence's replies. Where none of these queries writes one, all of them count in
    full (`kvp.store.replies.reply_windows`).
    """
    if label == "future_attention":
        total: Tensor = intervals.sum(dim=-2)
        return total
    largest: Tensor = intervals.amax(dim=-2)
    if label == "max_reply_attention" and not written_windows(spans, first, stop):
        largest = largest / READING
    return largest


def importance_at(trace: Trace, label: str, prefix_length: int) -> Tensor:
    """A label [L, H, prefix_length] at a point of a trace's grid; ValueError at others."""
    grid, record = trace.grids[label], trace.record
    everywhere = grid.shape[-2] == len(record.edges) - 1
    edges = record.edges if everywhere else (*record.common_edges, record.length)
    intervals = grid[..., intervals_between(edges, prefix_length, record.length), :prefix_length]
    return importance_of(label, intervals, record.reply_spans, prefix_length, record.length)


def root_scale(max_tokens: int) -> float:
    """Power of two that square roots are multiplied by in float16.

    The largest for which the attention of `max_tokens` queries does not overflow.
    """
    return 2.0 ** math.floor(math.log2(_LARGEST / math.sqrt(max_tokens)))


def encode(grid: Tensor, dtype: torch.dtype, scale: float) -> Tensor:
    """A grid as it is stored: float32 as they are, float16 as `scale` times the root.

    Roots halve the exponents, so float16 holds attention down to 1e-17 of the largest possible with
    a relative error below 1e-3; without them that would end at 1e-9.
    """
    return grid if dtype == torch.float32 else (grid.sqrt() * scale).to(dtype)


def decode(stored: Tensor, scale: float) -> Tensor:
    """Inverse of `encode`, float32."""
    return stored if stored.dtype == torch.float32 else (stored.float() / scale).square()
