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

from kvp.hf.attention import grouped_attention, kvp_attention_set
from kvp.hf.layer_kinds import OtherLayer
from kvp.hf.lent import LentCache, LentLayer
from kvp.hf.model_access import rope_kept


def gated_logits(
    model: PreTrainedModel,
    keys: Tensor,
    values: Tensor,
    input_ids: Tensor,
    log_gates: Tensor | None = None,
    others: Mapping[int, OtherLayer] | None = None,
) -> Tensor:
    """Logits of tokens that follow a gated cache: [T, V] in the model's dtype.

    Args:
        model: frozen; any that `evicting` accepts.
        keys: [L, H, N, D] after RoPE, of tokens at positions 0..N-1, on the model's device.
        values: the same shape.
        input_ids: [T] int64, at positions N..N+T-1; each sees the cache and those before it.
        log_gates: [L, H, N] float, at most 0; None keeps everything. Gradients reach it.
        others: caches of the layers that nothing is evicted from, after N tokens, which are copied
            (`Observation.others`).
    """
    layers = [
        _GatedLayer(keys[layer], values[layer], None if log_gates is None else log_gates[layer])
        for layer in range(keys.shape[0])
    ]
    with kvp_attention_set(model), rope_kept(model):
        cached, tokens = keys.shape[2], input_ids.shape[0]
        hidden = model.base_model(
            input_ids=input_ids[None],
            position_ids=torch.arange(cached, cached + tokens, device=input_ids.device)[None],
            past_key_values=LentCache(layers, others),
            use_cache=True,
        ).last_hidden_state  # [1, T, W]
    head: nn.Module = model.get_output_embeddings()  # type: ignore[no-untyped-call]
    logits: Tensor = head(hidden)[0]  # [T, V]
    return logits


class _GatedLayer(LentLayer):  # type: ignore[no-untyped-call]
    """A lent layer with a gate per token."""

    def __init__(self, keys: Tensor, values: Tensor, log_gates: Tensor | None) -> None:
        super().__init__(keys[None], values[None])  # [1, H, N, D]
        self._log_gates = log_gates

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
        new_keys, new_values = self.taken()
        tokens = query.shape[2]
        _, heads, cached, _ = self.keys.shape
        causal = torch.full((tokens, tokens), -torch.inf, device=query.device).triu(1)  # [T, T]
        gates = query.new_zeros(heads, cached) if self._log_gates is None else self._log_gates
        bias = torch.cat(
            [gates[:, None].expand(-1, tokens, -1), causal.expand(heads, -1, -1)], dim=-1
        ).to(query.dtype)  # [H, T, N + T]
        return grouped_attention(
            query,
            torch.cat([self.keys, new_keys], dim=2),
            torch.cat([self.values, new_values], dim=2),
            bias[None],
            scaling=options.get("scaling"),
        )
