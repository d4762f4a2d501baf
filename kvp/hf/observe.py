"""Run a model once and record keys, values and queries of its attention, after RoPE.

Serves collection (every query), eviction (the recent ones) and evaluation (one prefill for many
methods). Prompts here have no padding; `kvp.hf.eviction.evicting` deals with padded batches.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

from kvp.errors import UsageError
from kvp.hf.attention import QueryRecorder, kvp_attention_set
from kvp.hf.cache import EvictingCache
from kvp.hf.hidden import HiddenRecord, HiddenRecorder
from kvp.hf.wrappers import refuse_inside_block, unwrapped
from kvp.scoring import ALL_QUERIES


@dataclass(frozen=True, kw_only=True)
class Observation:
    """What one forward pass left behind. Tensors stay valid when the cache grows afterwards."""

    keys: tuple[Tensor, ...]
    """Per layer [B, H, N, D]: every key of the cache, earlier passes included."""
    values: tuple[Tensor, ...]
    """Per layer [B, H, N, D]."""
    queries: tuple[Tensor, ...]
    """Per layer [B, Q, W, D]: queries of the tokens fed in this pass, or the last W of them."""
    logits: Tensor
    """[B, T, V] for the tokens fed, or [B, 1, V] for the last one."""
    cache: EvictingCache
    """The cache, ready for the next tokens."""
    hidden: HiddenRecord | None = None
    """Statistics of the states entering each attention block, of the tokens fed in this pass."""


@torch.no_grad()
def observe(
    model: PreTrainedModel,
    input_ids: Tensor,
    *,
    cache: EvictingCache | None = None,
    queries: int = ALL_QUERIES,
    last_logits: bool = False,
    hidden_after: Sequence[int] = (),
) -> Observation:
    """Feed `input_ids` [B, T] int64 (no padding) after `cache` and observe every layer.

    `queries` is how many of the fed tokens' queries to keep (0 keeps none), `last_logits`
    computes logits of the last token only, `hidden_after` records statistics of the hidden states
    with that many of the fed tokens left out (several numbers, several statistics). Whatever
    attention is set on the model stays set. Raises UsageError when `cache` has already been shrunk
    and inside an `evicting` block of the same model.
    """
    model = unwrapped(model)
    refuse_inside_block(model)
    cache = EvictingCache() if cache is None else cache
    if cache.evicted:
        raise UsageError("observe needs a cache that still holds every token it has seen")
    recorder = QueryRecorder(queries)
    cache.recorder = recorder if queries else None
    states = HiddenRecorder(hidden_after) if hidden_after else None
    try:
        with (
            kvp_attention_set(model),
            nullcontext() if states is None else states.recording(model),
        ):
            output = model(
                input_ids=input_ids,
                past_key_values=cache,
                use_cache=True,
                logits_to_keep=1 if last_logits else 0,
            )
    finally:
        cache.recorder = None
    return Observation(
        keys=tuple(layer.keys for layer in cache.layers),
        values=tuple(layer.values for layer in cache.layers),
        queries=recorder.queries,
        logits=output.logits,
        cache=cache,
        hidden=None if states is None else states.record,
    )
