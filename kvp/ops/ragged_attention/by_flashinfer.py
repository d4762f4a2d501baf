"""Ragged attention of single tokens through FlashInfer: every head of every row is a request.

A request has one KV head, the G query heads of its group, one token of query and the tokens of its
flat part, which FlashInfer's attention over ragged keys reads where they lie. It returns the
log-sum-exp to the base 2 of every query head, so that the flat part takes part in the softmax over
the tail as one more token. Taken only where the backend `flashinfer` is asked for.

Not verified on a GPU: written to FlashInfer's documentation (0.2 and later) of
`BatchPrefillWithRaggedKVCacheWrapper` and tested with a stand-in of the same interface. FlashInfer
compiles kernels for head_dim 64, 128 and 256; what else it is given, it refuses itself.
"""

from __future__ import annotations

import math
from functools import cache
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from kvp.errors import UsageError
from kvp.ops.ragged_attention.layout import RaggedLayout

WORKSPACE_BYTES = 128 * 2**20
"""Scratch memory per device, as FlashInfer's documentation recommends."""

_Plans = dict[tuple[int, int, torch.dtype, float], Any]
_PLANS: WeakKeyDictionary[RaggedLayout, _Plans] = WeakKeyDictionary()
"""FlashInfer's wrappers, planned once per eviction. Each holds some megabytes of its own."""


def attend_by_flashinfer(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    layout: RaggedLayout,
    tail_keys: Tensor,
    tail_values: Tensor,
    tail_visible: Tensor | None,
    scaling: float,
) -> Tensor:
    """`ragged_attention_reference` for query [B, H * G, 1, D] in half precision.

    Raises UsageError for other dtypes.
    """
    if query.dtype not in (torch.float16, torch.bfloat16):
        raise UsageError(
            f"ragged backend 'flashinfer' does not take {query.dtype} tensors: choose 'auto'"
        )
    batch, heads, tail, width = tail_keys.shape
    packed = query.reshape(batch * heads, -1, width)  # [R, G, D]
    logits = packed.new_full((*packed.shape[:2], 1 + tail), -torch.inf, dtype=torch.float32)
    flat = torch.zeros_like(packed, dtype=torch.float32)  # [R, G, D]
    if layout.stored:
        wrapper = _planned(layout, packed, scaling)
        attended, log_sum = wrapper.run(packed, keys[:, None], values[:, None], return_lse=True)
        empty = (layout.lengths.flatten() == 0)[:, None]  # [R, 1]
        logits[..., 0] = (math.log(2) * log_sum).masked_fill(empty, -torch.inf)
        flat = attended.float().masked_fill(empty[..., None], 0.0)
    to_tail = scaling * packed.float() @ tail_keys.float().flatten(0, 1).transpose(1, 2)
    if tail_visible is not None:
        hidden = ~tail_visible[:, None]  # [B, 1, 1, S]
        to_tail.view(batch, heads, packed.shape[1], tail).masked_fill_(hidden, -torch.inf)
    logits[..., 1:] = to_tail
    blind = (logits == -torch.inf).all(dim=-1, keepdim=True)
    weights = logits.softmax(dim=-1).masked_fill(blind, 0.0)
    late = weights[..., 1:] @ tail_values.float().flatten(0, 1)
    return (weights[..., :1] * flat + late).to(query.dtype).view(query.shape)


def requests(layout: RaggedLayout) -> tuple[Tensor, Tensor]:
    """Where the queries and the keys of each request begin: int32 [R + 1], both.

    Request r is head r of the layout; it has query r and the keys of its flat part.
    """
    starts = layout.starts.int()
    return torch.arange(len(starts), dtype=torch.int32, device=starts.device), starts


def _planned(layout: RaggedLayout, packed: Tensor, scaling: float) -> Any:  # noqa: ANN401
    """The wrapper planned for queries [R, G, D]."""
    plans = _PLANS.setdefault(layout, {})
    group, width = packed.shape[1:]
    key = group, width, packed.dtype, scaling
    if key not in plans:
        import flashinfer

        wrapper = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(_workspace(packed.device), "NHD")
        queries, tokens = requests(layout)
        wrapper.plan(
            queries, tokens, group, 1, width,
            causal=False, sm_scale=scaling, q_data_type=packed.dtype,
        )  # fmt: skip
        plans[key] = wrapper
    return plans[key]


@cache
def _workspace(device: torch.device) -> Tensor:
    return torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=device)
