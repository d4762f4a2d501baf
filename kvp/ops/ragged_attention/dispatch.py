"""Ragged attention in the form that is fastest for the device and the shapes at hand."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from importlib.util import find_spec
from typing import Literal, Protocol, get_args

import torch
from torch import Tensor

from kvp.errors import UsageError
from kvp.ops.ragged_attention.by_size import attend_by_size
from kvp.ops.ragged_attention.layout import RaggedLayout
from kvp.ops.ragged_attention.reference import check_shapes, ragged_attention_reference

Backend = Literal["auto", "torch", "triton"]
"""What computes attention of single tokens: `auto` is `triton` on CUDA devices where that is
installed, else `torch`."""

_BACKEND: ContextVar[Backend] = ContextVar("ragged_backend", default="auto")


class _Form(Protocol):
    def __call__(
        self,
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        layout: RaggedLayout,
        tail_keys: Tensor,
        tail_values: Tensor,
        tail_visible: Tensor | None,
        scaling: float,
    ) -> Tensor: ...


@contextmanager
def ragged_backend(backend: Backend) -> Iterator[None]:
    """Choose the backend of every `ragged_attention` in the block that is not given one.

        with ragged_backend("torch"), evicting(model, policy, budget=128, allocator=...):
            model.generate(...)

    It holds for the current thread or task. Raises UsageError on an unknown name.
    """
    _known(backend)
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
    backend: Backend | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attention of new tokens over what each KV head stores, as `ragged_attention_reference`.

    Same arguments, result and errors. `lengths` may be a `RaggedLayout`, which keeps what is
    computed from them: give the same one for every token that is decoded. `backend` is for single
    tokens, None as `ragged_backend` says; chunks of tokens are computed in plain PyTorch, and so
    is what no kernel knows (`docs/decisions.md#ragged-heads`).

    Raises:
        ValueError: shapes disagree.
        UsageError: the backend asked for is not installed, or cannot compute this.
    """
    layout = lengths if isinstance(lengths, RaggedLayout) else RaggedLayout(lengths)
    check_shapes(query, keys, values, layout, tail_keys, tail_values, tail_visible, sinks)
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    if softcap is not None or sinks is not None:
        return ragged_attention_reference(
            query, keys, values, layout, tail_keys, tail_values, tail_visible,
            scaling=scaling, softcap=softcap, sinks=sinks,
        )  # fmt: skip
    form: _Form = attend_by_size
    if query.shape[2] == 1:
        form = _single(query, _BACKEND.get() if backend is None else backend)
    return form(query, keys, values, layout, tail_keys, tail_values, tail_visible, scaling)


def _single(query: Tensor, backend: Backend) -> _Form:
    """The form for one new token per entry of the batch."""
    if backend != "torch" and (query.is_cuda or backend != "auto"):
        kernel = _kernel(query, backend)
        if kernel is not None:
            return kernel
    return attend_by_size


def _kernel(query: Tensor, backend: Backend) -> _Form | None:
    """The fused kernel that was asked for, or that `auto` takes; None: there is none."""
    _known(backend)
    if not _installed("triton"):
        if backend == "auto":
            return None
        raise UsageError(
            f"ragged backend {backend!r} needs the package triton, which is not installed: run "
            "pip install triton, or choose 'auto'"
        )
    if backend != "auto" and not query.is_cuda:
        raise UsageError(f"ragged backend {backend!r} needs a CUDA device: choose 'auto'")
    # Imported here because it is an extra, and nobody without a GPU should wait for it.
    from kvp.ops.ragged_attention import kernel

    if query.dtype in kernel.DTYPES and query.shape[-1] <= kernel.WIDEST:
        return kernel.attend_by_kernel
    if backend == "triton":
        raise UsageError(
            f"ragged backend 'triton' has no {query.dtype} of head_dim {query.shape[-1]}, only "
            f"half and single precision up to {kernel.WIDEST}: choose 'auto'"
        )
    return None


def _known(backend: str) -> None:
    if backend not in get_args(Backend):
        names = ", ".join(get_args(Backend))
        raise UsageError(f"ragged backend {backend!r} is not known: choose one of {names}")


@cache
def _installed(package: str) -> bool:
    return find_spec(package) is not None
