"""Forward passes on top of a full cache, which is read layer by layer and never written.

`run_pass` reduces the attention that cached tokens receive to one number each (`kvp.ops.attention`;
the tokens of a pass come from `kvp.hf.scorer_inputs`). Layers that tokens are never evicted from
continue from a copy of their own cache.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, DynamicLayer

from kvp.errors import UsageError
from kvp.hf.attention import StoredKeys, plain_attention, use_kvp_attention
from kvp.hf.cache_layers import UntouchedLayer, arrange_layers, copy_layers
from kvp.hf.model_access import projected_norms, watch_states
from kvp.hf.model_config import rope_switch
from kvp.hf.rotary import restore_rope
from kvp.ops.attention import reconstruction_attention


class _LentCache(Cache):
    """A full cache that a pass may read; `untouched` are copied."""

    def __init__(self, lent: Sequence[_LentLayer], untouched: Mapping[int, Any] | None) -> None:
        super().__init__(layers=arrange_layers(lent, copy_layers(untouched or {})))

    def update(  # type: ignore[override]
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: object, **__: object
    ) -> tuple[Tensor, Tensor] | tuple[StoredKeys, StoredKeys]:
        """Hand the pass's keys and values to their layer, and the layer to the attention."""
        layer = self.layers[layer_idx]
        if not isinstance(layer, _LentLayer):
            return super().update(key_states, value_states, layer_idx)
        layer.of_pass = key_states, value_states
        stored = StoredKeys(layer, layer_idx)
        return stored, stored


_WORKING_FLOATS, _MANY_FLOATS = 2**21, 2**26
"""Attention probabilities held at a time: what a CPU's cache holds (8 MiB); on other devices few
large steps are faster (256 MiB)."""


@torch.no_grad()
def run_pass(
    model: PreTrainedModel,
    keys: Sequence[Tensor],
    values: Sequence[Tensor],
    input_ids: Tensor,
    window: slice,
    *,
    sinks: int = 0,
    untouched: Mapping[int, UntouchedLayer] | None = None,
    weighted: bool = False,
) -> list[Tensor]:
    """Feed `input_ids` [B, T] after the cached tokens and measure what the window receives.

    `keys` and `values` are per layer [B, H, N, D] of tokens at positions 0..N-1; the input is
    at N..N+T-1 and sees all of them; `untouched` are the caches of the model's other layers after
    the N tokens (`kvp.hf.model_config`), which are copied. The softmax covers the cached tokens in
    `window`, and those of the first `sinks` that come before it. `weighted` multiplies
    attention by the norm of the value behind the output projection of the query head, over the norm
    of the state that entered the attention block (KVzip+).

    Returns per layer [B, H, stop - start] float32. Raises UsageError when the input crosses the
    length where the model changes its RoPE.
    """
    cached, tokens, switch = keys[0].shape[2], input_ids.shape[1], rope_switch(model.config)
    if switch is not None and cached <= switch < cached + tokens:
        raise UsageError(
            f"this model changes its RoPE after {switch} tokens, and the extra pass of {tokens} "
            f"after {cached} cached ones crosses that: set a smaller chunk or shorten the prompt"
        )
    layers = [_LentLayer(*pair, window, sinks) for pair in zip(keys, values, strict=True)]

    def measure(layer: int, states: Tensor) -> None:
        layers[layer].norms = states.float().norm(dim=-1).clamp_min(torch.finfo().tiny)

    watched = watch_states(model, measure) if weighted else nullcontext()
    with watched, use_kvp_attention(model), restore_rope(model):
        # Not the whole model: no logits are read, and hooks on it (`evicting`) stay out.
        model.base_model(
            input_ids=input_ids,
            position_ids=torch.arange(cached, cached + tokens, device=input_ids.device)[None],
            past_key_values=_LentCache(layers, untouched),
            use_cache=True,
        )
    return [layer.signal for layer in layers]


class _LentLayer(DynamicLayer):
    """Lent keys and values [B, H, N, D]; it records the attention that their tokens receive."""

    keys: Tensor
    values: Tensor
    of_pass: tuple[Tensor, Tensor] | None = None
    """Keys and values of the pass [B, H, T, D], held only until they are attended."""
    signal: Tensor
    norms: Tensor | None = None
    """[B, T] norms of the states that enter the attention; None unless they are weights."""

    def __init__(self, keys: Tensor, values: Tensor, window: slice, sinks: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.lazy_initialization(keys, values)
        self.keys, self.values = keys, values
        self._window, self._sinks = window, min(sinks, window.start)

    def attend(
        self, module: nn.Module, query: Tensor, mask: Tensor | None, options: Mapping[str, Any]
    ) -> Tensor:
        """Attention of the pass as the plain model computes it; sets `signal`."""
        assert self.of_pass is not None
        (keys, values), self.of_pass = self.of_pass, None
        self._measure(module, query, keys, options.get("scaling"))
        keys = torch.cat([self.keys, keys], dim=2)  # [B, H, N + T, D]
        values = torch.cat([self.values, values], dim=2)
        return plain_attention(module, query, keys, values, mask, options)

    def _measure(
        self, module: nn.Module, query: Tensor, pass_keys: Tensor, scaling: float | None
    ) -> None:
        batch, query_heads, tokens, width = query.shape
        heads = pass_keys.shape[1]
        window, sinks = self._window, self._sinks
        keys = self.keys[:, :, window]
        if sinks:
            keys = torch.cat([self.keys[:, :, :sinks], keys], dim=2)
        key_weights = query_weights = None
        if self.norms is not None:
            values = self.values[:, :, window]
            key_weights = projected_norms(module, values, query_heads // heads)  # [B, H, G, N]
            key_weights = nn.functional.pad(key_weights, (sinks, 0), value=1.0)
            query_weights = 1.0 / self.norms[:, None].expand(-1, heads, -1)
        working = _WORKING_FLOATS if keys.is_cpu else _MANY_FLOATS
        signal = reconstruction_attention(
            query.reshape(batch, heads, -1, tokens, width),  # [B, H, G, T, D]
            keys,
            pass_keys,
            scaling=width**-0.5 if scaling is None else scaling,
            key_weights=key_weights,
            query_weights=query_weights,
            block=max(1, working // (batch * query_heads * (keys.shape[2] + tokens))),
        )
        self.signal = signal[..., sinks:]
