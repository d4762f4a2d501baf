"""Ragged attention in the form that is fastest for the device and the shapes at hand."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from importlib.util import find_spec
from typing import Literal

import torch
from torch import Tensor

from kvp.ops.ragged_attention.by_size import attend_by_size
from kvp.ops.ragged_attention.layout import RaggedLayout
from kvp.ops.ragged_attention.reference import check_shapes, ragged_attention_reference

Backend = Literal["auto", "torch"]
"""What computes attention of single tokens: `auto` is the Triton kernel on CUDA devices where
triton is installed, else plain PyTorch; `torch` is always that."""

_BACKEND: ContextVar[Backend] = ContextVar("ragged_backend", default="auto")


@contextmanager
def ragged_backend(backend: Backend) -> Iterator[None]:
    """Choose the backend of every `ragged_attention` in the block, in this thread or task."""
    token = _BACKEND.set(backend)
    try:
        yield
    finally:
        _BACKEND.reset(token)


@torch.no_grad()
def ragged_attention(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    lengths: Tensor | RaggedLayout,
    tail_keys: Tensor,
    tail_values: Tensor,
    tail_visible: Tensor | None = None,
    *,
    scaling: float | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attention of new tokens over what each KV head stores, as `ragged_attention_reference`.

    Same arguments, result and errors. `lengths` may be a `RaggedLayout`, which keeps what is
    computed from them: give the same one for every token that is decoded. Chunks of tokens are
    computed in plain PyTorch, and so is what the kernel does not know
    (`docs/decisions.md#ragged-heads`).
    """
    layout = lengths if isinstance(lengths, RaggedLayout) else RaggedLayout(lengths)
    check_shapes(query, keys, values, layout, tail_keys, tail_values, tail_visible, sinks)
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    arguments = (query, keys, values, layout, tail_keys, tail_values, tail_visible)
    if softcap is not None or sinks is not None:
        return ragged_attention_reference(*arguments, scaling=scaling, softcap=softcap, sinks=sinks)
    if query.shape[2] == 1 and query.is_cuda and _BACKEND.get() == "auto" and _has_triton():
        # Imported here because triton is an extra, and nobody without a GPU should wait for it.
        from kvp.ops.ragged_attention import kernel

        if query.dtype in kernel.DTYPES and query.shape[-1] <= kernel.WIDEST:
            return kernel.attend_by_kernel(*arguments, scaling)
    return attend_by_size(*arguments, scaling)


@cache
def _has_triton() -> bool:
    return find_spec("triton") is not None
