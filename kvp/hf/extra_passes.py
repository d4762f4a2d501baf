"""Extra forward passes on top of a full cache, and the attention its tokens receive in them.

The cache is read, never written: a pass sees keys and values of the prompt and of itself, and those
of itself are dropped after each layer. The attention is reduced layer by layer to one number per
cached token. The tokens of a pass come from `kvp.hf.reconstruction`; the formula is
`kvp.ops.reconstruction_attention`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from kvp.errors import ModelError, UsageError
from kvp.hf.attention import kvp_attention_set, plain_attention
from kvp.hf.layer_kinds import OtherLayer
from kvp.hf.lent import LentCache, LentLayer
from kvp.hf.limits import rope_switch
from kvp.hf.model_access import on_meta, rope_kept, states_watched
from kvp.hf.output_projection import projected_norms
from kvp.ops.reconstruction_attention import reconstruction_attention

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
    N tokens (`kvp.hf.layer_kinds`), which are copied. `weighted` multiplies attention by the norm
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
    _refuse_rope_switch(model, keys[0].shape[2], input_ids.shape[1])
    with ExitStack() as undo:
        undo.enter_context(kvp_attention_set(model))
        undo.enter_context(rope_kept(model))
        norms: dict[int, Tensor] = {}
        if weighted:

            def measure(layer: int, states: Tensor) -> None:
                # [B, T] norm of the state that enters the attention of each token
                norms[layer] = states.float().norm(dim=-1).clamp_min(torch.finfo().tiny)

            undo.enter_context(states_watched(model, measure))
        layers = [
            _MeasuredLayer(layer_keys, layer_values, window, index, norms if weighted else None)
            for index, (layer_keys, layer_values) in enumerate(zip(keys, values, strict=True))
        ]
        # Not the whole model: no logits are read, and hooks on it (`evicting`) stay out of this.
        cached, tokens = keys[0].shape[2], input_ids.shape[1]
        model.base_model(
            input_ids=input_ids,
            position_ids=torch.arange(cached, cached + tokens, device=input_ids.device)[None],
            past_key_values=LentCache(layers, others),
            use_cache=True,
        )
    return [layer.signal for layer in layers]


class _MeasuredLayer(LentLayer):  # type: ignore[no-untyped-call]
    """A lent layer that leaves behind what its tokens received."""

    signal: Tensor

    def __init__(
        self,
        keys: Tensor,
        values: Tensor,
        window: SoftmaxWindow,
        index: int,
        norms: Mapping[int, Tensor] | None,
    ) -> None:
        super().__init__(keys, values)
        self._window, self._index, self._norms = window, index, norms

    def attend(
        self,
        module: nn.Module,
        query: Tensor,
        mask: Tensor | None,
        options: Mapping[str, Any],
        *,
        first: bool,
    ) -> Tensor:
        """Attention of the pass as the plain model computes it; leaves the signal behind."""
        pass_keys, pass_values = self.taken()
        scaling = options.get("scaling")
        self._measure(
            module, query, pass_keys, query.shape[-1] ** -0.5 if scaling is None else scaling
        )
        return plain_attention(
            module,
            query,
            torch.cat([self.keys, pass_keys], dim=2),
            torch.cat([self.values, pass_values], dim=2),
            mask,
            **options,
        )

    def _measure(self, module: nn.Module, query: Tensor, pass_keys: Tensor, scaling: float) -> None:
        batch, query_heads, tokens, width = query.shape
        heads = pass_keys.shape[1]
        window = self._window
        sinks = min(window.sinks, window.start)
        keys = self.keys[:, :, window.start : window.stop]
        if sinks:
            keys = torch.cat([self.keys[:, :, :sinks], keys], dim=2)
        key_weights = query_weights = None
        if self._norms is not None:
            values = self.values[:, :, window.start : window.stop]
            key_weights = projected_norms(module, values, query_heads // heads)  # [B, H, G, N]
            key_weights = nn.functional.pad(key_weights, (sinks, 0), value=1.0)
            query_weights = 1.0 / self._norms[self._index][:, None].expand(-1, heads, -1)
        working = _WORKING_FLOATS.get(keys.device.type, _MANY_FLOATS)
        signal = reconstruction_attention(
            query.reshape(batch, heads, -1, tokens, width),  # [B, H, G, T, D]
            keys,
            pass_keys,
            scaling=scaling,
            key_weights=key_weights,
            query_weights=query_weights,
            block=max(1, working // (batch * query_heads * (keys.shape[2] + tokens))),
        )
        self.signal = signal[..., sinks:]


def _refuse_rope_switch(model: PreTrainedModel, cached: int, tokens: int) -> None:
    switch = rope_switch(model.config)
    if switch is not None and cached <= switch < cached + tokens:
        raise UsageError(
            f"this model changes its RoPE after {switch} tokens, and the extra pass of {tokens} "
            f"after {cached} cached ones crosses that: set a smaller chunk or shorten the prompt"
        )
