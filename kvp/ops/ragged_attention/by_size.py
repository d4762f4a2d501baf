"""Ragged attention in plain PyTorch: heads of like length, side by side, in one call.

A call has a cost of its own, whatever its size: one per head would be slow for many short heads,
one padded to the longest head for heads of very different lengths (`RaggedLayout.groups`).
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from kvp.ops.ragged_attention.layout import Group, RaggedLayout

_WORKING = 2**21
"""Entries of a mask held at a time."""


def attend_by_size(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    layout: RaggedLayout,
    tail_keys: Tensor,
    tail_values: Tensor,
    tail_visible: Tensor | None,
    scaling: float,
    *,
    working: int = _WORKING,
) -> Tensor:
    """`ragged_attention_reference` without caps and sinks, a call per group of heads.

    Keys and values of a group are copied next to their tail. A mask has at most `working` entries,
    but those of one token and head.
    """
    batch, heads, tail, width = tail_keys.shape
    packed = query.reshape(batch * heads, -1, query.shape[2], width)  # [R, G, T, D]
    late_keys, late_values = tail_keys.flatten(0, 1), tail_values.flatten(0, 1)
    attended = torch.empty_like(packed)
    for group, some in _parts(layout, packed, tail, working):
        of = group.heads
        rows = packed[:, :, some].index_select(0, of)  # [A, G, T, D]
        mask = None
        if tail_visible is not None or group.present is not None:
            seen = rows.new_ones(len(of), 1, group.width + tail, dtype=torch.bool)
            if group.present is not None:
                seen[:, 0, : group.width] = group.present
            if tail_visible is not None:
                seen = seen.repeat(1, rows.shape[2], 1)
                seen[..., group.width :] = tail_visible[of // heads, some]
                seen = seen.repeat(1, rows.shape[1], 1)  # [A, G * T, W + S]
            mask = seen[:, None]
        result = scaled_dot_product_attention(
            rows.flatten(1, 2)[:, None],
            torch.cat([group.tokens(keys), late_keys.index_select(0, of)], dim=1)[:, None],
            torch.cat([group.tokens(values), late_values.index_select(0, of)], dim=1)[:, None],
            attn_mask=mask,
            scale=scaling,
        )
        attended[of, :, some] = result.view(rows.shape)
    return attended.view(query.shape)


def _parts(
    layout: RaggedLayout, packed: Tensor, tail: int, working: int
) -> Iterator[tuple[Group, slice]]:
    """Parts of the groups and of the tokens whose masks are held together."""
    group_size, tokens = packed.shape[1:3]
    for group in layout.groups:
        fit = max(1, working // max(1, group_size * (group.width + tail)))  # tokens, of any head
        span = min(fit, tokens)
        for part in group.split(max(1, fit // max(1, span))):
            for first in range(0, tokens, span):
                yield part, slice(first, first + span)
