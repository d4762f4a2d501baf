"""Refuse models that kvp would evict from wrongly, in one line and before any work."""

from __future__ import annotations

from collections.abc import Collection
from textwrap import shorten
from weakref import WeakSet

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from kvp.errors import ModelError, UsageError
from kvp.hf.attention import ForeignAttentionError, kvp_attention_set
from kvp.hf.cache import EvictingCache
from kvp.hf.layer_kinds import FULL, LEFT_ALONE, evicted_layers, layer_kinds
from kvp.hf.model_access import on_meta, rope_kept
from kvp.hf.model_geometry import geometry_of

_NOISE = 0.1
"""Relative difference of logits that is no rounding, in any dtype."""
_CHECKED: WeakSet[PreTrainedModel] = WeakSet()
"""Models that have run once with an evicting cache."""


def check_config(config: PreTrainedConfig) -> None:
    """Raise ModelError unless some layers attend to all earlier tokens by a softmax over keys.

    Other layers must be of kinds whose caches can be left alone (`kvp.hf.layer_kinds`).
    """
    kind = f"model type {config.model_type!r}"
    if config.is_encoder_decoder:
        raise ModelError(f"{kind} has an encoder: kvp evicts from decoder-only models")
    text = config.get_text_config(decoder=True)
    if getattr(text, "kv_lora_rank", None) is not None:
        raise ModelError(
            f"{kind} attends over latent entries that all its heads share (MLA, kv_lora_rank): "
            "kvp keeps other tokens for every head, choose a model with keys per KV head"
        )
    kinds, evicted = layer_kinds(config), evicted_layers(config)
    if not evicted:
        raise ModelError(
            f"{kind} has no layer of full attention alone (its layers: "
            f"{', '.join(sorted(set(kinds)))}): choose a model with such layers"
        )
    unknown = {kinds[i] for i in range(len(kinds)) if i not in evicted} - LEFT_ALONE
    if unknown:
        raise ModelError(
            f"{kind} has layers of kind {', '.join(sorted(unknown))}, whose caches kvp cannot copy"
        )
    modes = getattr(text, "kv_sharing_modes", None) or [None] * len(kinds)
    listed = getattr(text, "layer_types", None) or kinds
    if any(mode == "reuse" and listed[i] == FULL for i, mode in enumerate(modes)):
        raise ModelError(
            f"{kind} has layers with full attention that read the cache of another one: kvp ranks "
            "tokens for one layer at a time, choose a model whose layers own their caches"
        )


def check_model(model: PreTrainedModel) -> None:
    """Raise ModelError unless kvp's attention can replace the model's own.

    The first time, the model runs over one token with an evicting cache: whether its attention
    passes positions and leaves the cache's handle alone shows in no attribute.
    """
    check_config(model.config)
    name = type(model).__name__
    known = model._supports_sdpa or _capped_or_with_sinks(model)
    if not (known and model._can_set_attn_implementation()):
        raise ModelError(f"{name} does not let kvp replace its attention: choose another model")
    if model in _CHECKED or on_meta(model):  # weights on the meta device: accelerate moves them
        return
    embedding = model.get_input_embeddings().weight
    assert isinstance(embedding, torch.Tensor)
    token = torch.zeros(1, 1, dtype=torch.int64, device=embedding.device)
    try:
        with torch.no_grad(), kvp_attention_set(model), rope_kept(model):
            cache = EvictingCache.of(model.config)
            # Not through __call__: hooks of the caller, and compiled code, stay out of this.
            model.forward(input_ids=token, past_key_values=cache, use_cache=True)
            _check_stored(model.config, cache)
            _check_continues(model)
    except (UsageError, _UnfitError):
        raise
    except ForeignAttentionError as error:  # although kvp's attention is set
        raise ModelError(
            f"kvp cannot evict from {name}: its layers work on the cached keys themselves"
        ) from error
    except Exception as error:  # whatever the code of an unknown model raises
        reason = shorten(str(error).split("\n")[0], width=120, placeholder=" ...")
        raise ModelError(f"kvp cannot evict from {name}: {reason}") from error
    _CHECKED.add(model)


class _UnfitError(ModelError):
    """A model that ran, and showed that it is none to evict from."""


def _capped_or_with_sinks(model: PreTrainedModel) -> bool:
    """Whether a model without sdpa differs from it only by what kvp's attention computes itself."""
    capped = getattr(model.config.get_text_config(decoder=True), "attn_logit_softcapping", None)
    return capped is not None or any(hasattr(module, "sinks") for module in model.modules())


def _check_stored(config: PreTrainedConfig, cache: EvictingCache) -> None:
    """Raise ModelError unless every layer to evict from holds one token of the heads expected."""
    geometry = geometry_of(config)
    expected = (1, geometry.kv_heads, 1, geometry.head_dim)
    layers = cache.stored
    found = {tuple(x.shape) for layer in layers.values() for x in (layer.keys, layer.values)}
    if tuple(layers) != tuple(geometry.model_layers) or found != {expected}:
        shapes = " and ".join(f"{heads} x {width}" for _, heads, _, width in sorted(found))
        raise _UnfitError(
            f"model type {config.model_type!r} caches keys and values of {shapes} numbers per "
            f"token, where kvp expects {geometry.kv_heads} x {geometry.head_dim} for both: choose "
            "another model"
        )


def _check_continues(model: PreTrainedModel) -> None:
    """Raise ModelError where recurrent layers lose their state when several tokens are fed at once.

    Some classes of transformers go on from a state by single tokens alone (Jamba), and kvp feeds
    the rest of a prompt in one piece. Measured on the model without eviction.
    """
    if not {"linear_attention", "conv"} & set(layer_kinds(model.config)):
        return
    embedding = model.get_input_embeddings().weight
    assert isinstance(embedding, torch.Tensor)
    ids = torch.arange(8, device=embedding.device)[None] % embedding.shape[0]
    cache = EvictingCache.of(model.config)
    whole = model.forward(input_ids=ids, use_cache=False).logits[:, 5:].float()
    model.forward(input_ids=ids[:, :5], past_key_values=cache, use_cache=True)
    positions = torch.arange(5, 8, device=ids.device)[None]
    parts = model.forward(
        input_ids=ids[:, 5:], position_ids=positions, past_key_values=cache, use_cache=True
    ).logits.float()
    if float((parts - whole).norm()) > _NOISE * float(whole.norm()):
        raise _UnfitError(
            f"{type(model).__name__} does not continue its recurrent layers when several tokens "
            "are fed at once, in this version of transformers: choose another model"
        )


def check_weights(model: PreTrainedModel, name: str, *, missing: Collection[str]) -> None:
    """Raise ModelError naming a weight that the files of model `name` lack, or that is not finite.

    transformers fills missing weights with random numbers.
    """
    if missing:
        raise ModelError(
            f"--model {name}: {len(missing)} weights are missing from its files, among them "
            f"{min(missing)}: download or save the model again"
        )
    for key, weight in model.named_parameters():
        if weight.is_meta or not weight.is_floating_point():
            continue
        # A sum keeps NaN and infinity, and holds no mask of the weight's size.
        if not bool(weight.detach().sum(dtype=torch.float32).isfinite()):
            raise ModelError(
                f"--model {name}: weight {key} holds NaN or infinity: download or save the model "
                "again"
            )
