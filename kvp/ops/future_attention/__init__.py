"""Future attention: how much attention every cached token will receive (KVP paper, section 3.1.1).

`reference.py` is the definition, `blocked.py` the same numbers on CPUs, `kernel.py` on CUDA devices
where triton is installed. All take a weight per query, such as less for queries that write no
reply.
"""

from __future__ import annotations

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
    return _received(queries, keys, prefix_length, stop, "sum", weights)


def max_future_attention(
    queries: Tensor,
    keys: Tensor,
    prefix_length: int,
    stop: int | None = None,
    weights: Tensor | None = None,
) -> Tensor:
    """[..., N] float32 largest attention; `reference.max_future_attention` is the definition."""
    return _received(queries, keys, prefix_length, stop, "max", weights)


def _received(
    queries: Tensor,
    keys: Tensor,
    prefix_length: int,
    stop: int | None,
    reduction: Literal["sum", "max"],
    weights: Tensor | None,
) -> Tensor:
    last = keys.shape[-2] if stop is None else stop
    window = (prefix_length, last, prefix_length)
    if keys.is_cuda and find_spec("triton") is not None:
        # Imported here because triton is an extra, and nobody without a GPU should wait for it.
        from kvp.ops.future_attention import kernel

        return kernel.received_attention(queries, keys, *window, reduction, weights=weights)
    return blocked.received_attention(queries, keys, *window, reduction, weights=weights)
