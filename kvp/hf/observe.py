"""Run a model once and keep what its attention saw: keys, values and queries after RoPE.

Serves collection (every query), eviction (the recent ones) and evaluation (one prefill for many
methods). Prompts here have no padding; `kvp.hf.eviction.evicting` deals with padded batches.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

from kvp.errors import UsageError
from kvp.hf.attention import QueryRecorder, kvp_attention_set
from kvp.hf.cache import EvictingCache
from kvp.hf.hidden import HiddenRecord, HiddenRecorder
from kvp.hf.scorer_inputs import LayerInputs, ScorerInputs, needs_scorer_inputs
from kvp.scoring import ALL_QUERIES, Needs, View


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

    `queries` says how many of the fed tokens' queries to keep (0 keeps none), `last_logits`
    computes logits of the last token only, `hidden_after` records statistics of the hidden states
    with that many of the fed tokens left out (several numbers, several statistics). Whatever
    attention is set on the model stays set. Raises UsageError when `cache` has already been shrunk.
    """
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


def views(
    observation: Observation,
    needs: Needs,
    budget: int,
    future: Sequence[Tensor] | None = None,
    scorer_inputs: ScorerInputs | None = None,
) -> Iterator[View]:
    """Yield each layer's view for a scorer with `needs` that will keep `budget` tokens per head.

    `future` is per layer [B, H, N] float32; `scorer_inputs` belongs to the same prompt and serves
    what goes beyond keys, values and queries. Raises ValueError when the observation recorded fewer
    queries than the scorer reads, or when `future` or `scorer_inputs` is needed and missing;
    otherwise as `ScorerInputs.for_needs`.
    """
    if needs.future and future is None:
        raise ValueError("this scorer reads future attention, which the caller must supply")
    if scorer_inputs is None and needs_scorer_inputs(needs):
        raise ValueError("this scorer reads what only a Supply of the prompt can give")
    layers = len(observation.keys)
    extras = (LayerInputs(),) * layers if scorer_inputs is None else scorer_inputs.for_needs(needs)
    for index, (keys, values) in enumerate(zip(observation.keys, observation.values, strict=True)):
        batch, _, tokens, _ = keys.shape
        yield View(
            layer=index,
            keys=keys,
            values=values,
            positions=torch.arange(tokens, device=keys.device).expand(batch, tokens),
            budget=budget,
            queries=recent_queries(observation.queries, index, needs, tokens),
            future=future[index] if needs.future and future is not None else None,
            **vars(extras[index]),
        )


def recent_queries(
    queries: Sequence[Tensor], layer: int, needs: Needs, tokens: int
) -> Tensor | None:
    """The last queries [B, Q, W, D] of `layer` that a scorer with `needs` reads of `tokens`.

    `queries` are [B, Q, at least W, D] per layer. None when the scorer reads none; ValueError when
    too few were recorded.
    """
    if needs.queries == 0:
        return None
    window = tokens if needs.queries == ALL_QUERIES else min(needs.queries, tokens)
    recorded = queries[layer].shape[2] if queries else 0
    if recorded < window:
        raise ValueError(f"{window} queries are needed, {recorded} were observed")
    return queries[layer][:, :, recorded - window :]
