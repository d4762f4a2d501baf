"""Future attention as two Triton kernels: the form for CUDA devices.

The first pass finds the softmax statistics of every query, the second gives each program a block of
keys, recomputes the probabilities and sums them, so no two programs write the same number and
nothing is added atomically. Logits and sums are float32 whatever the inputs are; neither pass
computes a tile that causality hides. Imported only where triton is: it is the optional extra `gpu`.
"""

from typing import Literal

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvp.ops.attention import check_queries
from kvp.ops.triton_support import LOG2_E


@torch.no_grad()
def receive_by_kernel(
    queries: Tensor,
    keys: Tensor,
    start: int,
    stop: int,
    tokens: int,
    reduction: Literal["sum", "max"] = "sum",
    block: int | None = None,
    weights: Tensor | None = None,
) -> Tensor:
    """`kvp.ops.future_attention.receive_by_tiles`, arguments, result and errors included.

    `block` queries and `block` keys make a tile (a power of two, at least 16); None takes 64, or 32
    for float32, so that a tile of 256 channels fits the shared memory of every device since 2018.
    Inputs of float16 and bfloat16 are multiplied as they are, all others as float32.
    """
    if queries.dtype != keys.dtype or keys.dtype not in (torch.float16, torch.bfloat16):
        queries, keys = queries.float(), keys.float()
    if block is None:
        block = 32 if keys.dtype == torch.float32 else 64
    check_queries(queries, keys, start, stop, block, weights)
    group, length, width = queries.shape[-3:]
    flat_queries = queries.reshape(keys.shape[:-2].numel(), group, length, width).contiguous()
    flat_keys = keys.reshape(len(flat_queries), length, width).contiguous()
    heads, count = len(flat_keys), stop - start
    result = keys.new_zeros(heads, tokens, dtype=torch.float32)
    if not heads or not count or not tokens:
        return result.reshape(*keys.shape[:-2], tokens)
    largest = keys.new_empty(heads, group, count, dtype=torch.float32)
    log_sum = torch.empty_like(largest)
    of_query = largest if weights is None else weights.to(largest).contiguous()
    # Softmax to the base 2: the factor that makes it one to the base e goes into the scale.
    scale = width**-0.5 * LOG2_E
    sizes = {
        "group": group,
        "width": width,
        "padded_width": max(16, triton.next_power_of_2(width)),
        "block": block,
        "num_warps": 4,
        "num_stages": 2,
    }
    with torch.cuda.device(keys.get_device()):  # Triton launches on the current device
        _query_statistics[(triton.cdiv(count, block), heads * group)](
            flat_queries, flat_keys, largest, log_sum, scale, length, start, count, **sizes
        )
        _sums[(triton.cdiv(tokens, block), heads)](
            flat_queries, flat_keys, largest, log_sum, of_query, result, scale, length, start,
            count, tokens, is_sum=reduction == "sum", weighted=weights is not None, **sizes,
        )  # fmt: skip
    return result.reshape(*keys.shape[:-2], tokens)


@triton.jit  # type: ignore[untyped-decorator]
def _query_statistics(
    queries: tl.tensor,
    keys: tl.tensor,
    largest: tl.tensor,
    log_sum: tl.tensor,
    scale: tl.tensor,
    length: tl.tensor,
    start: tl.tensor,
    count: tl.tensor,
    group: tl.constexpr,
    width: tl.constexpr,
    padded_width: tl.constexpr,
    block: tl.constexpr,
) -> None:
    # One program: positions first..first+block-1 of one query head. Writes the largest logit m and
    # log2 of the sum of 2^(logit - m), both [heads, group, queries].
    query_head = tl.program_id(1).to(tl.int64)
    first = start + tl.program_id(0) * block
    stop = start + count
    position = first + tl.arange(0, block)
    column = tl.arange(0, padded_width)
    query = tl.load(
        queries + query_head * length * width + position[:, None] * width + column[None, :],
        mask=(position < stop)[:, None] & (column < width)[None, :],
        other=0.0,
    )
    head_keys = keys + query_head // group * length * width
    top = tl.full([block], -float("inf"), tl.float32)
    total = tl.zeros([block], tl.float32)
    for key_start in range(0, tl.minimum(first + block, stop), block):
        token = key_start + tl.arange(0, block)
        key = tl.load(
            head_keys + token[None, :] * width + column[:, None],
            mask=(token < stop)[None, :] & (column < width)[:, None],
            other=0.0,
        )
        logits = tl.dot(query, key, input_precision="ieee") * scale
        # Positions after the last query stay causal too, so that none is empty.
        logits = tl.where(token[None, :] <= position[:, None], logits, -float("inf"))
        new_top = tl.maximum(top, tl.max(logits, 1))
        total = total * tl.exp2(top - new_top) + tl.sum(tl.exp2(logits - new_top[:, None]), 1)
        top = new_top
    offset = query_head * count + position - start
    tl.store(largest + offset, top, mask=position < stop)
    tl.store(log_sum + offset, tl.log2(total), mask=position < stop)


@triton.jit  # type: ignore[untyped-decorator]
def _sums(
    queries: tl.tensor,
    keys: tl.tensor,
    largest: tl.tensor,
    log_sum: tl.tensor,
    weights: tl.tensor,
    result: tl.tensor,
    scale: tl.tensor,
    length: tl.tensor,
    start: tl.tensor,
    count: tl.tensor,
    tokens: tl.tensor,
    group: tl.constexpr,
    width: tl.constexpr,
    padded_width: tl.constexpr,
    block: tl.constexpr,
    is_sum: tl.constexpr,
    weighted: tl.constexpr,
) -> None:
    # One program: the keys key_start..key_start+block-1 of one KV head.
    key_start = tl.program_id(0) * block
    head = tl.program_id(1).to(tl.int64)
    token = key_start + tl.arange(0, block)
    column = tl.arange(0, padded_width)
    key = tl.load(
        keys + head * length * width + token[None, :] * width + column[:, None],
        mask=(token < tokens)[None, :] & (column < width)[:, None],
        other=0.0,
    )
    stop = start + count
    paid = tl.zeros([block], tl.float32)
    # Queries before the first of these keys see none of them.
    for first in range(tl.maximum(start, key_start), stop, block):
        position = first + tl.arange(0, block)
        inside = position < stop
        best = tl.full([block, block], -float("inf"), tl.float32)
        for member in range(group):
            query_head = head * group + member
            query = tl.load(
                queries + query_head * length * width + position[:, None] * width + column[None, :],
                mask=inside[:, None] & (column < width)[None, :],
                other=0.0,
            )
            offset = query_head * count + position - start
            top = tl.load(largest + offset, mask=inside, other=0.0)
            total = tl.load(log_sum + offset, mask=inside, other=0.0)
            logits = tl.dot(query, key, input_precision="ieee") * scale
            # Subtracted one after the other: the first difference is exact where it matters.
            best = tl.maximum(best, logits - top[:, None] - total[:, None])
        seen = inside[:, None] & (token[None, :] <= position[:, None])
        attention = tl.where(seen, tl.exp2(best), 0.0)
        if weighted:
            attention *= tl.load(weights + position, mask=inside, other=0.0)[:, None]
        if is_sum:
            paid += tl.sum(attention, 0)
        else:
            paid = tl.maximum(paid, tl.max(attention, 0))
    tl.store(result + head * tokens + token, paid, mask=token < tokens)
