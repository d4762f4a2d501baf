"""The fastest form of each function for the device of the keys."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from typing import Literal

from torch import Tensor

from kvp.ops.future_attention import blocked


def future_attention(
    queries: Tensor,
    keys: Tensor,
    prefix_length: int,
    stop: int | None = None,
    weights: Tensor | None = None,
) -> Tensor:
    """[..., N] float32 importance; `reference.future_attention` is the definition."""
    edges = (prefix_length, keys.shape[-2] if stop is None else stop)
    return _interval_attention(queries, keys, edges, prefix_length, "sum", weights)[..., 0, :]


def max_future_attention(
    queries: Tensor,
    keys: Tensor,
    prefix_length: int,
    stop: int | None = None,
    weights: Tensor | None = None,
) -> Tensor:
    """[..., N] float32 largest attention; `reference.max_future_attention` is the definition."""
    edges = (prefix_length, keys.shape[-2] if stop is None else stop)
    return _interval_attention(queries, keys, edges, prefix_length, "max", weights)[..., 0, :]


def grid_attention(
    queries: Tensor, keys: Tensor, edges: Sequence[int], weights: Tensor | None = None
) -> Tensor:
    """[..., E, edges[-1]] float32; `reference.grid_attention` is the definition."""
    tokens = edges[-1] if len(edges) else 0
    return _interval_attention(queries, keys, edges, tokens, "sum", weights)


def max_grid_attention(
    queries: Tensor, keys: Tensor, edges: Sequence[int], weights: Tensor | None = None
) -> Tensor:
    """[..., E, edges[-1]] float32; `reference.max_grid_attention` is the definition."""
    tokens = edges[-1] if len(edges) else 0
    return _interval_attention(queries, keys, edges, tokens, "max", weights)


def _interval_attention(
    queries: Tensor,
    keys: Tensor,
    edges: Sequence[int],
    tokens: int,
    reduction: Literal["sum", "max"],
    weights: Tensor | None,
) -> Tensor:
    if keys.is_cuda and find_spec("triton") is not None:
        # Imported here because triton is an extra, and nobody without a GPU should wait for it.
        from kvp.ops.future_attention import kernel

        return kernel.interval_attention(queries, keys, edges, tokens, reduction, weights=weights)
    return blocked.interval_attention(queries, keys, edges, tokens, reduction, weights=weights)
