"""Weights of queries: every form against the full matrix in float64, sums and maxima."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from kvp.ops.future_attention import future_attention, max_future_attention
from kvp.ops.future_attention import reference as definition
from kvp.ops.future_attention.blocked import received_attention

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
    for total in (
        definition.future_attention(q, k, prefix, stop, 4, w),
        received_attention(q, k, prefix, stop, prefix, block=3, weights=w),
        future_attention(q, k, prefix, stop, w),
    ):
        np.testing.assert_allclose(total, paid.sum(axis=0), rtol=2e-5, atol=2e-6)
    expected = paid.max(axis=0, initial=0.0)
    for largest in (
        definition.max_future_attention(q, k, prefix, stop, 4, w),
        received_attention(q, k, prefix, stop, prefix, "max", block=3, weights=w),
        max_future_attention(q, k, prefix, stop, w),
    ):
        np.testing.assert_allclose(largest, expected, rtol=2e-5, atol=2e-6)


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
    result = max_future_attention(many_q, many_k, 9, weights=w.to(dtype))
    assert result.shape == (1, 2, 9)
    alone = definition.max_future_attention(-q.float(), k.float(), 9, weights=w.to(dtype))
    torch.testing.assert_close(result[0, 1], alone, rtol=1e-5, atol=1e-6)


def test_weights_of_another_length_are_refused() -> None:
    q, k, w = _case()
    for wrong in (w[:-1], w[None], torch.ones(())):
        with pytest.raises(ValueError, match=r"weights of queries must be \[T\]"):
            future_attention(q, k, 9, weights=wrong)
        with pytest.raises(ValueError, match=r"weights of queries must be \[T\]"):
            definition.max_future_attention(q, k, 9, weights=wrong)
