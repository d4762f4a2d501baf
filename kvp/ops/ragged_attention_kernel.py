"""Ragged attention of single tokens as two Triton kernels: the form for CUDA devices.

The first gives each program one piece of one head: a stretch of its flat part, or of its tail. It
writes the attention over that piece and the log-sum-exp of its logits. The second merges the
pieces of a head by them. Pieces are cut by length, so a long head keeps no more of the device
waiting than a short one. Logits and sums are float32 whatever the inputs are. Imported only where
triton is: it is the optional extra `gpu`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvp.ops.triton_support import LOG2_E

if TYPE_CHECKING:
    from kvp.ops.ragged_attention import StoredTokens

WIDEST = 256
"""Largest head_dim."""
DTYPES = (torch.float16, torch.bfloat16, torch.float32)
_TILE_BYTES = 2**14  # of keys: with values and stages, 64 KiB before compute capability 8, 99 after


@torch.no_grad()
def attend_by_kernel(query: Tensor, stored: StoredTokens, scaling: float) -> Tensor:
    """`ragged_attention_reference` for query [B, H * G, 1, D], D up to `WIDEST`, in `DTYPES`.

    All tensors have the dtype of `query`. Working memory: G * (D + 1) floats per piece.
    """
    keys, values, layout, tail_keys, tail_values, tail_visible = stored
    batch, heads, tail, width = tail_keys.shape
    group = query.shape[1] // heads
    result = torch.empty_like(query, memory_format=torch.contiguous_format)
    if not result.numel():
        return result
    piece_head, first_piece = layout.pieces
    tail_pieces = triton.cdiv(tail, layout.piece)
    flat_count = piece_head.shape[0]
    count = flat_count + batch * heads * tail_pieces
    parts = query.new_empty(count, group, width, dtype=torch.float32)
    sums = query.new_empty(count, group, dtype=torch.float32)
    late_keys, late_values = (
        late if late.stride()[2:] == (width, 1) else late.contiguous()
        for late in (tail_keys, tail_values)
    )
    rows, columns = (max(16, triton.next_power_of_2(size)) for size in (group, width))
    block = tokens_per_tile(columns, keys.element_size(), layout.piece)
    sizes = {"group": group, "width": width, "rows": rows, "columns": columns, "num_warps": 4}
    shown = None if tail_visible is None else tail_visible.contiguous().view(torch.uint8)
    with torch.cuda.device(keys.get_device()):  # Triton launches on the current device
        if count:
            _attend_pieces[(count,)](
                query.contiguous(), keys.contiguous(), values.contiguous(), layout.starts,
                piece_head, first_piece, late_keys, late_values,
                keys if shown is None else shown,
                parts, sums, scaling * LOG2_E, flat_count, tail_pieces, tail, heads,
                *late_keys.stride()[:2], *late_values.stride()[:2],
                piece=layout.piece, block=block, is_masked=shown is not None, num_stages=2, **sizes,
            )  # fmt: skip
        _merge_pieces[(batch * heads,)](
            parts, sums, first_piece, result, flat_count, tail_pieces, **sizes
        )
    return result


def tokens_per_tile(columns: int, element_size: int, piece: int) -> int:
    """Tokens that are multiplied together: a power of two, at least 16, as products need."""
    return max(16, min(64, _TILE_BYTES // (columns * element_size), piece))


@triton.jit(do_not_specialize=["tail"])  # type: ignore[untyped-decorator]
def _attend_pieces(
    queries: tl.tensor, keys: tl.tensor, values: tl.tensor, starts: tl.tensor,
    piece_head: tl.tensor, first_piece: tl.tensor, tail_keys: tl.tensor, tail_values: tl.tensor,
    visible: tl.tensor, parts: tl.tensor, sums: tl.tensor, scale: tl.tensor,
    flat_count: tl.tensor, tail_pieces: tl.tensor, tail: tl.tensor,
    heads: tl.tensor, key_entry: tl.tensor, key_head: tl.tensor, value_entry: tl.tensor,
    value_head: tl.tensor, piece: tl.constexpr, block: tl.constexpr, group: tl.constexpr,
    width: tl.constexpr, rows: tl.constexpr, columns: tl.constexpr, is_masked: tl.constexpr,
) -> None:  # fmt: skip
    # One program: the tokens low..high-1 of one head's flat part, or of its tail. Writes their
    # attention [group, width] and log2 of the sum of 2^logit [group], -inf where nothing is seen.
    number = tl.program_id(0)
    is_flat = number < flat_count
    if is_flat:
        head = tl.load(piece_head + number).to(tl.int64)
        start = tl.load(starts + head)
        low = (number - tl.load(first_piece + head)) * piece
        stored = tl.load(starts + head + 1) - start
        key_base, value_base = keys + start * width, values + start * width
        visible_base = visible
    else:
        late = number - flat_count
        head = (late // tail_pieces).to(tl.int64)
        low = ((late % tail_pieces) * piece).to(tl.int64)
        stored = tail.to(tl.int64)
        key_base = tail_keys + head // heads * key_entry + head % heads * key_head
        value_base = tail_values + head // heads * value_entry + head % heads * value_head
        visible_base = visible + head // heads * tail
    row, column = tl.arange(0, rows), tl.arange(0, columns)
    inside = (row < group)[:, None] & (column < width)[None, :]
    of_head = (head * group + row[:, None]) * width + column[None, :]
    query = tl.load(queries + of_head, mask=inside, other=0.0)
    attended, log_sum = _attend(
        query, key_base, value_base, visible_base, is_flat, low, tl.minimum(low + piece, stored),
        scale, block, width, rows, columns, is_masked,
    )  # fmt: skip
    part = number.to(tl.int64) * group + row
    tl.store(parts + part[:, None] * width + column[None, :], attended, mask=inside)
    tl.store(sums + part, log_sum, mask=row < group)


@triton.jit  # type: ignore[untyped-decorator]
def _attend(
    query: tl.tensor, keys: tl.tensor, values: tl.tensor, visible: tl.tensor, is_flat: tl.tensor,
    low: tl.tensor, high: tl.tensor, scale: tl.tensor, block: tl.constexpr, width: tl.constexpr,
    rows: tl.constexpr, columns: tl.constexpr, is_masked: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:  # fmt: skip
    # Attention [rows, columns] over the tokens low..high-1 of one head, log2 of its sum [rows].
    # The tail has a mask.
    column = tl.arange(0, columns)
    top = tl.full([rows], -float("inf"), tl.float32)
    total = tl.zeros([rows], tl.float32)
    attended = tl.zeros([rows, columns], tl.float32)
    for first in range(0, (high - low).to(tl.int32), block):
        token = low + first + tl.arange(0, block)
        seen = token < high
        offset = token[:, None] * width + column[None, :]
        inside = seen[:, None] & (column < width)[None, :]
        key = tl.load(keys + offset, mask=inside, other=0.0)
        logits = tl.dot(query, tl.trans(key), input_precision="ieee") * scale
        if is_masked:
            shown = tl.load(visible + token, mask=seen & (is_flat == 0), other=1)
            seen = seen & (shown != 0)
        logits = tl.where(seen[None, :], logits, -float("inf"))
        new_top = tl.maximum(top, tl.max(logits, 1))
        origin = tl.where(new_top == -float("inf"), 0.0, new_top)  # of rows that see nothing
        weights, shrink = tl.exp2(logits - origin[:, None]), tl.exp2(top - origin)
        total = total * shrink + tl.sum(weights, 1)
        value = tl.load(values + offset, mask=inside, other=0.0)
        # Weights of half precision in two halves, so that their products are those of float32.
        coarse = weights.to(value.dtype)
        products = tl.dot(coarse, value, input_precision="ieee")
        if value.dtype != tl.float32:
            fine = (weights - coarse.to(tl.float32)).to(value.dtype)
            products += tl.dot(fine, value, input_precision="ieee")
        attended = attended * shrink[:, None] + products
        top = new_top
    total = tl.where(total > 0.0, total, 1.0)
    return attended / total[:, None], top + tl.log2(total)


@triton.jit  # type: ignore[untyped-decorator]
def _merge_pieces(
    parts: tl.tensor,
    sums: tl.tensor,
    first_piece: tl.tensor,
    result: tl.tensor,
    flat_count: tl.tensor,
    tail_pieces: tl.tensor,
    group: tl.constexpr,
    width: tl.constexpr,
    rows: tl.constexpr,
    columns: tl.constexpr,
) -> None:
    # One program: one head. Its pieces weigh 2^sum; zeros where it sees nothing.
    head = tl.program_id(0).to(tl.int64)
    row, column = tl.arange(0, rows), tl.arange(0, columns)
    row_mask = row < group
    mask = row_mask[:, None] & (column < width)[None, :]
    first = tl.load(first_piece + head)
    flat = tl.load(first_piece + head + 1) - first
    top = tl.full([rows], -float("inf"), tl.float32)
    total = tl.zeros([rows], tl.float32)
    merged = tl.zeros([rows, columns], tl.float32)
    for index in range(flat + tail_pieces):
        late = flat_count + head * tail_pieces + index - flat
        part = tl.where(index < flat, first + index, late) * group + row
        log_sum = tl.load(sums + part, mask=row_mask, other=-float("inf"))
        attended = tl.load(parts + part[:, None] * width + column[None, :], mask=mask, other=0.0)
        new_top = tl.maximum(top, log_sum)
        origin = tl.where(new_top == -float("inf"), 0.0, new_top)
        shrink, weight = tl.exp2(top - origin), tl.exp2(log_sum - origin)
        merged = merged * shrink[:, None] + attended * weight[:, None]
        total = total * shrink + weight
        top = new_top
    merged = merged / tl.where(total > 0.0, total, 1.0)[:, None]
    offset = (head * group + row[:, None]) * width + column[None, :]
    tl.store(result + offset, merged.to(result.dtype.element_ty), mask=mask)
