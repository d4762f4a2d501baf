"""Forward passes on top of a full cache, which is read layer by layer and never written.

`run_pass` reduces the attention that cached tokens receive to one number each, layer by layer (the
formula is `kvp.ops.attention`, the tokens of a pass come from
`kvp.hf.scorer_inputs`). `gated_logits` multiplies the weight of a cached token, before the softmax
is normalised, by a gate in [0, 1]: with gates of 0 and 1 this is eviction, with anything between
them eviction that gradients pass through. Layers that tokens are never evicted from go on from a
copy of their own cache.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, DynamicLayer

from kvp.errors import ModelError, UsageError
from kvp.hf.attention import StoredKeys, grouped_attention, kvp_attention_set, plain_attention
from kvp.hf.cache_layers import OtherLayer, arranged, copies
from kvp.hf.model_access import on_meta, projected_norms, rope_kept, states_watched
from kvp.hf.model_config import rope_switch
from kvp.ops.attention import reconstruction_attention


class _LentCache(Cache):
    """A full cache that a pass may read; `others` are copied."""

    def __init__(self, lent: Sequence[_LentLayer], others: Mapping[int, OtherLayer] | None) -> None:
        super().__init__(layers=arranged(lent, copies(others or {})))

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


class _LentLayer(DynamicLayer):
    """Keys and values [B, H, N, D], lent; holds those of the pass only until they are attended."""

    keys: Tensor
    values: Tensor
    of_pass: tuple[Tensor, Tensor] | None = None

    def __init__(self, keys: Tensor, values: Tensor) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.lazy_initialization(keys, values)
        self.keys, self.values = keys, values

    def attend(
        self, module: nn.Module, query: Tensor, mask: Tensor | None, options: Mapping[str, Any]
    ) -> Tensor:
        """Attention of the pass, as `kvp.hf.attention.AttendingLayer`."""
        raise NotImplementedError

    def with_pass(self) -> tuple[Tensor, Tensor]:
        """Keys and values [B, H, N + T, D], those of the pass last; these are held no longer."""
        assert self.of_pass is not None
        (keys, values), self.of_pass = self.of_pass, None
        return torch.cat([self.keys, keys], dim=2), torch.cat([self.values, values], dim=2)


def _fed(
    model: PreTrainedModel,
    lent: Sequence[_LentLayer],
    input_ids: Tensor,
    others: Mapping[int, OtherLayer] | None,
) -> Tensor:
    """Hidden states [B, T, W] of `input_ids` [B, T] after the tokens of the lent cache."""
    cached, tokens = lent[0].keys.shape[2], input_ids.shape[1]
    with kvp_attention_set(model), rope_kept(model):
        # Not the whole model: not all logits are read, and hooks on it (`evicting`) stay out.
        output = model.base_model(
            input_ids=input_ids,
            position_ids=torch.arange(cached, cached + tokens, device=input_ids.device)[None],
            past_key_values=_LentCache(lent, others),
            use_cache=True,
        )
    hidden: Tensor = output.last_hidden_state
    return hidden


_WORKING_FLOATS = {"cpu": 2**21}
"""Attention probabilities held at a time, by kind of device: what its cache holds (8 MiB)."""
_MANY_FLOATS = 2**26
"""The same for other devices, where few large steps are faster (256 MiB)."""


@dataclass(frozen=True, kw_only=True)
class SoftmaxWindow:
    """Which cached tokens are in the softmax of a pass, and get a signal from it."""

    start: int
    """First token that gets a signal."""
    stop: int
    """One past the last."""
    sinks: int = 0
    """First tokens that are in the softmax too, as far as they come before `start`."""


@torch.no_grad()
def run_pass(
    model: PreTrainedModel,
    keys: Sequence[Tensor],
    values: Sequence[Tensor],
    input_ids: Tensor,
    window: SoftmaxWindow,
    *,
    others: Mapping[int, OtherLayer] | None = None,
    weighted: bool = False,
) -> list[Tensor]:
    """Feed `input_ids` [B, T] after the cached tokens and measure what the window receives.

    `keys` and `values` are per layer [B, H, N, D] of tokens at positions 0..N-1; the input is
    at N..N+T-1 and sees all of them; `others` are the caches of the model's other layers after the
    N tokens (`kvp.hf.model_config`), which are copied. `weighted` multiplies attention by the norm
    of the value behind the output projection of the query head, over the norm of the state that
    entered the attention block (KVzip+).

    Returns per layer [B, H, stop - start] float32. Raises UsageError when the input crosses the
    length where the model changes its RoPE, ModelError for an offloaded model.
    """
    if on_meta(model):
        raise ModelError(
            f"weights of this {type(model).__name__} are offloaded (accelerate), and extra passes "
            "over the prompt need them: load the whole model, or choose another method"
        )
    cached, tokens, switch = keys[0].shape[2], input_ids.shape[1], rope_switch(model.config)
    if switch is not None and cached <= switch < cached + tokens:
        raise UsageError(
            f"this model changes its RoPE after {switch} tokens, and the extra pass of {tokens} "
            f"after {cached} cached ones crosses that: set a smaller chunk or shorten the prompt"
        )
    layers = [_MeasuredLayer(*pair, window) for pair in zip(keys, values, strict=True)]

    def measure(layer: int, states: Tensor) -> None:
        layers[layer].norms = states.float().norm(dim=-1).clamp_min(torch.finfo().tiny)

    with states_watched(model, measure) if weighted else nullcontext():
        _fed(model, layers, input_ids, others)
    return [layer.signal for layer in layers]


class _MeasuredLayer(_LentLayer):  # type: ignore[no-untyped-call]
    """A lent layer that leaves behind what its tokens received."""

    signal: Tensor
    norms: Tensor | None = None
    """[B, T] of the states that enter the attention of each token, where they weigh."""

    def __init__(self, keys: Tensor, values: Tensor, window: SoftmaxWindow) -> None:
        super().__init__(keys, values)
        self._window = window

    def attend(
        self, module: nn.Module, query: Tensor, mask: Tensor | None, options: Mapping[str, Any]
    ) -> Tensor:
        """Attention of the pass as the plain model computes it; leaves the signal behind."""
        assert self.of_pass is not None
        self._measure(module, query, self.of_pass[0], options.get("scaling"))
        return plain_attention(module, query, *self.with_pass(), mask, options)

    def _measure(
        self, module: nn.Module, query: Tensor, pass_keys: Tensor, scaling: float | None
    ) -> None:
        batch, query_heads, tokens, width = query.shape
        heads = pass_keys.shape[1]
        window = self._window
        sinks = min(window.sinks, window.start)
        keys = self.keys[:, :, window.start : window.stop]
        if sinks:
            keys = torch.cat([self.keys[:, :, :sinks], keys], dim=2)
        key_weights = query_weights = None
        if self.norms is not None:
            values = self.values[:, :, window.start : window.stop]
            key_weights = projected_norms(module, values, query_heads // heads)  # [B, H, G, N]
            key_weights = nn.functional.pad(key_weights, (sinks, 0), value=1.0)
            query_weights = 1.0 / self.norms[:, None].expand(-1, heads, -1)
        working = _WORKING_FLOATS.get(keys.device.type, _MANY_FLOATS)
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
    hidden = _fed(model, layers, input_ids[None], others)  # [1, T, W]
    head: nn.Module = model.get_output_embeddings()  # type: ignore[no-untyped-call]
    logits: Tensor = head(hidden)[0]  # [T, V]
    return logits


class _GatedLayer(_LentLayer):  # type: ignore[no-untyped-call]
    """A lent layer with a gate per token."""

    def __init__(self, keys: Tensor, values: Tensor, log_gates: Tensor | None) -> None:
        super().__init__(keys[None], values[None])  # [1, H, N, D]
        self._log_gates = log_gates

    def attend(
        self, module: nn.Module, query: Tensor, mask: Tensor | None, options: Mapping[str, Any]
    ) -> Tensor:
        """Attention of the tokens that follow, [1, T, Q, D]; `mask` is causal and not needed."""
        tokens = query.shape[2]
        _, heads, cached, _ = self.keys.shape
        causal = torch.full((tokens, tokens), -torch.inf, device=query.device).triu(1)  # [T, T]
        gates = query.new_zeros(heads, cached) if self._log_gates is None else self._log_gates
        bias = torch.cat(
            [gates[:, None].expand(-1, tokens, -1), causal.expand(heads, -1, -1)], dim=-1
        ).to(query.dtype)  # [H, T, N + T]
        return grouped_attention(module, query, *self.with_pass(), bias[None], options)
