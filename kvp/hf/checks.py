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
from kvp.hf.limits import attention_window
from kvp.hf.model_access import on_meta, rope_kept

_CHECKED: WeakSet[PreTrainedModel] = WeakSet()
"""Models that have run once with an evicting cache."""


def check_config(config: PreTrainedConfig) -> None:
    """Raise ModelError unless every layer attends to all earlier tokens by plain softmax."""
    kind = f"model type {config.model_type!r}"
    if config.is_encoder_decoder:
        raise ModelError(f"{kind} has an encoder: kvp evicts from decoder-only models")
    text = config.get_text_config(decoder=True)
    kinds = set(getattr(text, "layer_types", None) or ["full_attention"])
    window, reach = attention_window(text), getattr(text, "max_position_embeddings", None)
    if "sliding_attention" in kinds or (window is not None and (reach is None or window < reach)):
        window = getattr(text, "sliding_window", None)
        raise ModelError(
            f"{kind} attends through a sliding window of {window} tokens and drops others before "
            "any policy sees them: choose a model with full attention"
        )
    other = kinds - {"full_attention"}
    if other:
        raise ModelError(
            f"{kind} has layers of kind {', '.join(sorted(other))}: "
            "kvp evicts from full attention only"
        )
    for field in ("attn_logit_softcapping", "kv_lora_rank"):
        if getattr(text, field, None) is not None:
            raise ModelError(f"{kind} uses an attention kvp cannot compute ({field})")


def check_model(model: PreTrainedModel) -> None:
    """Raise ModelError unless kvp's attention can replace the model's own.

    The first time, the model runs over one token with an evicting cache: whether its attention
    passes positions and leaves the cache's handle alone shows in no attribute.
    """
    check_config(model.config)
    name = type(model).__name__
    if not (model._supports_sdpa and model._can_set_attn_implementation()):
        raise ModelError(f"{name} does not let kvp replace its attention: choose another model")
    if model in _CHECKED or on_meta(model):  # weights on the meta device: accelerate moves them
        return
    embedding = model.get_input_embeddings().weight
    assert isinstance(embedding, torch.Tensor)
    token = torch.zeros(1, 1, dtype=torch.int64, device=embedding.device)
    try:
        with torch.no_grad(), kvp_attention_set(model), rope_kept(model):
            # Not through __call__: hooks of the caller, and compiled code, stay out of this.
            model.forward(input_ids=token, past_key_values=EvictingCache(), use_cache=True)
    except UsageError:
        raise
    except ForeignAttentionError as error:  # although kvp's attention is set
        raise ModelError(
            f"kvp cannot evict from {name}: its layers work on the cached keys themselves"
        ) from error
    except Exception as error:  # whatever the code of an unknown model raises
        reason = shorten(str(error).split("\n")[0], width=120, placeholder=" ...")
        raise ModelError(f"kvp cannot evict from {name}: {reason}") from error
    _CHECKED.add(model)


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
