"""Weights of queries: every form against the full matrix in float64, sums and maxima."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import numpy as np
import pytest
import torch
from torch import Tensor

from kvp.ops.future_attention import (
    future_attention,
    grid_attention,
    max_future_attention,
    max_grid_attention,
)
from kvp.ops.future_attention import reference as definition
from kvp.ops.future_attention.blocked import interval_attention

FullAttention = Callable[[np.ndarray, np.ndarray], np.ndarray]
TOKENS = 37


def _case(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    queries = 3 * torch.randn(3, TOKENS, 8, generator=generator)
    keys = torch.randn(TOKENS, 8, generator=generator)
    weights = torch.rand(TOKENS, generator=generator)
    weights[::5] = 0.0
    return queries.to(dtype), keys.to(dtype), weights


def _weighted(
    full_attention: FullAttention, queries: Tensor, keys: Tensor, w: Tensor
) -> np.ndarray:
    """[T, T] of the query times the key."""
    largest = full_attention(queries.double().numpy(), keys.double().numpy()).max(axis=0)
    product: np.ndarray = largest * w.double().numpy()[:, None]
    return product


@pytest.mark.parametrize(("prefix", "stop"), [(20, 37), (1, 37), (36, 37), (20, 31), (5, 5)])
def test_one_compression_point(full_attention: FullAttention, prefix: int, stop: int) -> None:
    q, k, w = _case()
    paid = _weighted(full_attention, q, k, w)[prefix:stop, :prefix]
    edges = (prefix, stop)
    for total in (
        definition.future_attention(q, k, prefix, stop, 4, w),
        interval_attention(q, k, edges, prefix, block=3, weights=w)[0],
        future_attention(q, k, prefix, stop, w),
    ):
        np.testing.assert_allclose(total, paid.sum(axis=0), rtol=2e-5, atol=2e-6)
    expected = paid.max(axis=0, initial=0.0)
    for largest in (
        definition.max_future_attention(q, k, prefix, stop, 4, w),
        interval_attention(q, k, edges, prefix, "max", block=3, weights=w)[0],
        max_future_attention(q, k, prefix, stop, w),
    ):
        np.testing.assert_allclose(largest, expected, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("edges", [(0, 37), (0, 1, 2, 3), (4, 4, 9, 9, 20), (5, 30, 36), (0, 0)])
@pytest.mark.parametrize("weighted", [True, False])
def test_grids(full_attention: FullAttention, edges: tuple[int, ...], weighted: bool) -> None:
    q, k, w = _case()
    given = w if weighted else None
    paid = _weighted(full_attention, q, k, w if weighted else torch.ones(TOKENS))
    parts = [paid[low:high, : edges[-1]] for low, high in pairwise(edges)]
    sums = np.stack([part.sum(axis=0) for part in parts])
    for grid in (
        definition.grid_attention(q, k, edges, 4, given),
        grid_attention(q, k, edges, given),
    ):
        np.testing.assert_allclose(grid, sums, rtol=2e-5, atol=2e-6)
    largest = np.stack([part.max(axis=0, initial=0.0) for part in parts])
    for grid in (
        definition.max_grid_attention(q, k, edges, 4, given),
        max_grid_attention(q, k, edges, given),
    ):
        assert grid.dtype == torch.float32
        assert grid.shape == (len(edges) - 1, edges[-1])
        np.testing.assert_allclose(grid, largest, rtol=2e-5, atol=2e-6)


def test_maxima_of_a_grid_are_the_labels_of_its_points() -> None:
    """As a store of grids needs it: any point, any later stop on the grid."""
    q, k, w = _case()
    edges = (3, 9, 20, 30, 37)
    grid = max_grid_attention(q, k, edges, w)
    for first in range(4):
        for last in range(first + 1, 5):
            point, stop = edges[first], edges[last]
            expected = definition.max_future_attention(q, k, point, stop, weights=w)
            torch.testing.assert_close(grid[first:last, :point].amax(0), expected)


def test_weights_say_what_two_passes_over_windows_say() -> None:
    """A fifth of all queries, or all of a window: the maximum of two maxima."""
    q, k, _ = _case()
    weights = torch.full((TOKENS,), 0.2)
    weights[25:31] = 1.0
    everyone, window = max_future_attention(q, k, 12), max_future_attention(q, k, 25, 31)[:12]
    expected = torch.maximum(0.2 * everyone, window)
    torch.testing.assert_close(max_future_attention(q, k, 12, weights=weights), expected)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_weights_of_any_type_and_leading_axes(dtype: torch.dtype) -> None:
    q, k, w = _case(dtype)
    many_q, many_k = torch.stack([q, -q])[None], torch.stack([k, k])[None]
    result = max_grid_attention(many_q, many_k, (9, 20, 37), w.to(dtype))
    assert result.shape == (1, 2, 2, 37)
    alone = definition.max_grid_attention(-q.float(), k.float(), (9, 20, 37), weights=w.to(dtype))
    torch.testing.assert_close(result[0, 1], alone, rtol=1e-5, atol=1e-6)


def test_weights_of_another_length_are_refused() -> None:
    q, k, w = _case()
    for wrong in (w[:-1], w[None], torch.ones(())):
        with pytest.raises(ValueError, match=r"weights of queries must be \[T\]"):
            future_attention(q, k, 9, weights=wrong)
        with pytest.raises(ValueError, match=r"weights of queries must be \[T\]"):
            definition.max_grid_attention(q, k, (9, 20), weights=wrong)
