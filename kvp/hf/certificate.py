"""How far off attention over an evicting cache may be: an estimate from the kept tokens alone.

For caches whose tokens were drawn by lot with weights (`kvp.inclusion`, the allocator `sampled`).
The estimate is of the error that drawing makes in the output of one layer, for the queries that the
layer gets; that the queries of later layers moved, too, it does not see. A cache without weights
has error 0, which says nothing: what a deterministic eviction lost cannot be known from what it
kept. Source of the idea: arXiv 2607.21475.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from transformers import PreTrainedModel

from kvp.hf.attention import QueryRecorder
from kvp.hf.cache import EvictingCache
from kvp.hf.generation import next_logits
from kvp.inclusion import EstimatedOutput, attention_error


def record_queries(
    model: PreTrainedModel, cache: EvictingCache, tokens: Tensor, position: int
) -> tuple[Tensor, ...]:
    """Feed tokens [B, T] int64, the first at `position`: per layer their queries [B, Q, T, D]."""
    cache.recorder = QueryRecorder()
    try:
        next_logits(model, tokens, cache, position, keep=1)
        return cache.recorder.queries
    finally:
        cache.recorder = None


@torch.no_grad()
def estimated_errors(
    model: PreTrainedModel, cache: EvictingCache, tokens: Tensor, position: int
) -> Iterator[EstimatedOutput]:
    """Feed tokens and yield the attention of every layer over the cache with its error.

    Args:
        model: with kvp's attention (`kvp.hf.load_model`).
        cache: shrunk; the tokens are appended to it.
        tokens: [B, T] int64, without padding: the rest of a prompt and a reply, for instance.
        position: true position of the first of them.

    Yields:
        Per layer the output [B, Q, T, D] before the output projection, and its error [B, Q, T].
        Memory: 3 floats of 8 bytes for every query head, token fed and slot of one layer.
    """
    queries = record_queries(model, cache, tokens, position)
    positions = torch.arange(position, position + tokens.shape[1], device=tokens.device)
    for layer, of_layer in zip(cache.stored.values(), queries, strict=True):
        keys, values, bias = layer.slots
        visible = layer.positions[:, :, None] <= positions[:, None]  # [B, H, T, S]
        yield error_of(of_layer, keys, values, bias, visible)


def error_of(
    queries: Tensor, keys: Tensor, values: Tensor, bias: Tensor, visible: Tensor
) -> EstimatedOutput:
    """Attention of queries [B, Q, T, D] over slots and its error: [B, Q, T, D] and [B, Q, T].

    Keys and values [B, H, S, D], bias [B, H, S] float32 (log(1 / pi)), visible [B, H, T, S] bool.
    Scaled by 1/sqrt(D): recorded queries carry what a model scales otherwise.
    """
    batch, heads, tokens, width = queries.shape
    group = heads // keys.shape[1]
    grouped = queries.view(batch, keys.shape[1], group, tokens, width).double()
    logits = grouped @ keys.double()[:, :, None].mT * width**-0.5  # [B, H, G, T, S]
    logits = logits.masked_fill(~visible[:, :, None], -torch.inf)
    found = attention_error(logits, values[:, :, None], bias[:, :, None])
    return EstimatedOutput(output=found.output.flatten(1, 2), error=found.error.flatten(1, 2))
