"""Logits behind a cache whose tokens are evicted in part; gradients reach how much of each is kept.

A gate g in [0, 1] multiplies the weight of a cached token before the softmax is normalised: log g
is added to its attention logits. With gates of 0 and 1 this is eviction, with anything between them
eviction that gradients pass through. Keys and values are those of one full prefill, as everywhere
in kvp; only the tokens that follow run through the model.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, DynamicLayer

from kvp.hf.attention import StoredKeys, kvp_attention_set
from kvp.hf.model_access import rope_kept


def gated_logits(
    model: PreTrainedModel,
    keys: Tensor,
    values: Tensor,
    input_ids: Tensor,
    log_gates: Tensor | None = None,
) -> Tensor:
    """Logits of tokens that follow a gated cache: [T, V] in the model's dtype.

    Args:
        model: frozen; any that `evicting` accepts.
        keys: [L, H, N, D] after RoPE, of tokens at positions 0..N-1, on the model's device.
        values: the same shape.
        input_ids: [T] int64, at positions N..N+T-1; each sees the cache and those before it.
        log_gates: [L, H, N] float, at most 0; None keeps everything. Gradients reach it.
    """
    layers = [
        _GatedLayer(keys[layer], values[layer], None if log_gates is None else log_gates[layer])
        for layer in range(keys.shape[0])
    ]
    with kvp_attention_set(model), rope_kept(model):
        hidden = model.base_model(
            input_ids=input_ids[None], past_key_values=_GatedCache(layers=[*layers]), use_cache=True
        ).last_hidden_state  # [1, T, W]
    head: nn.Module = model.get_output_embeddings()  # type: ignore[no-untyped-call]
    logits: Tensor = head(hidden)[0]  # [T, V]
    return logits


class _GatedCache(Cache):
    """A full cache with a gate per token."""

    def update(  # type: ignore[override]
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: object, **__: object
    ) -> tuple[StoredKeys, StoredKeys]:
        layer = self.layers[layer_idx]
        assert isinstance(layer, _GatedLayer)
        layer.update(key_states, value_states)
        stored = StoredKeys(layer, layer_idx, None)
        return stored, stored


class _GatedLayer(DynamicLayer):
    """One layer's keys and values with their gates, and those of the tokens that follow."""

    keys: Tensor
    values: Tensor

    def __init__(self, keys: Tensor, values: Tensor, log_gates: Tensor | None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.lazy_initialization(keys[None], values[None])
        self.keys, self.values = keys[None], values[None]  # [1, H, N, D]
        self._log_gates = log_gates
        self._following: tuple[Tensor, Tensor] | None = None

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Hold keys and values [1, H, T, D] of the tokens that follow until they are attended."""
        self._following = key_states, value_states
        return key_states, value_states

    def attend(
        self,
        module: nn.Module,
        query: Tensor,
        mask: Tensor | None,
        options: Mapping[str, Any],
        *,
        first: bool,
    ) -> Tensor:
        """Attention of the tokens that follow, [1, T, Q, D]; `mask` is causal and not needed."""
        assert self._following is not None
        (new_keys, new_values), self._following = self._following, None
        _, query_heads, tokens, width = query.shape
        heads, cached = self.keys.shape[1], self.keys.shape[2]
        group = query_heads // heads
        causal = torch.full((tokens, tokens), -torch.inf, device=query.device).triu(1)  # [T, T]
        gates = query.new_zeros(heads, cached) if self._log_gates is None else self._log_gates
        bias = torch.cat(
            [gates[:, None].expand(-1, tokens, -1), causal.expand(heads, -1, -1)], dim=-1
        ).to(query.dtype)  # [H, T, N + T]
        attended = nn.functional.scaled_dot_product_attention(
            query.reshape(1, heads, group * tokens, width),
            torch.cat([self.keys, new_keys], dim=2),
            torch.cat([self.values, new_values], dim=2),
            attn_mask=bias.repeat(1, group, 1)[None],
            scale=options.get("scaling"),
        )  # [1, H, G * T, D]
        return attended.reshape(1, query_heads, tokens, width).transpose(1, 2).contiguous()
