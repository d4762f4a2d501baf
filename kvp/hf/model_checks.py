"""Checks of a model: one that kvp cannot evict from is refused in one line, before any work."""

from collections.abc import Collection
from weakref import WeakSet

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from kvp.errors import ModelError, UsageError, first_line
from kvp.hf.attention import ForeignAttentionError, use_kvp_attention
from kvp.hf.cache import EvictingCache
from kvp.hf.model_config import check_config, geometry_of, layer_kinds
from kvp.hf.rotary import restore_rope

_NOISE = 0.1
"""Relative difference of logits that is no rounding, in any dtype."""
_CHECKED: WeakSet[PreTrainedModel] = WeakSet()
"""Models that have run once with an evicting cache."""


def check_mode(model: PreTrainedModel) -> None:
    """Raise UsageError in a training mode that drops the cache or activations.

    Raises ModelError where accelerate has offloaded weights until a module runs.
    """
    if any(weight.is_meta for weight in model.parameters()):
        raise ModelError("weights of this model are offloaded (accelerate): load the whole model")
    for module in model.modules():
        attributes = vars(module)
        acts = attributes.get("attention_dropout") or (isinstance(module, nn.Dropout) and module.p)
        if module.training and (acts or getattr(module, "gradient_checkpointing", False)):
            raise UsageError(
                "this model is in training mode, with dropout or gradient checkpointing, which "
                "keeps no cache: call model.eval() first"
            )


def check_model(model: PreTrainedModel) -> None:
    """Raise ModelError unless kvp's attention can replace the model's own; `check_mode` first.

    The first time, the model runs over one token with an evicting cache, since no attribute shows
    whether its attention passes positions and leaves the cache's handle alone.
    """
    check_mode(model)
    check_config(model.config)
    name = type(model).__name__
    # Caps of logits and sinks are all that kvp's attention adds to sdpa.
    capped = getattr(model.config.get_text_config(decoder=True), "attn_logit_softcapping", None)
    sunk = any(hasattr(module, "sinks") for module in model.modules())
    supported = model._supports_sdpa or capped is not None or sunk
    if not hasattr(model, "generate"):
        raise ModelError(f"{name} writes no text: load it by AutoModelForCausalLM or load_model")
    if not (supported and model._can_set_attn_implementation()):
        raise ModelError(f"{name} does not let kvp replace its attention: choose another model")
    if model in _CHECKED:
        return
    token = torch.zeros(1, 1, dtype=torch.int64, device=model.device)
    cache = EvictingCache.of(model.config)
    with torch.no_grad(), use_kvp_attention(model), restore_rope(model):
        try:
            # Not through __call__: hooks of the caller, and compiled code, stay out of this.
            model.forward(input_ids=token, past_key_values=cache, use_cache=True)
        except ForeignAttentionError as error:  # although kvp's attention is set
            raise ModelError(
                f"kvp cannot evict from {name}: its layers work on the cached keys themselves"
            ) from error
        except Exception as error:  # whatever the code of an unknown model raises
            raise ModelError(f"kvp cannot evict from {name}: {first_line(error)}") from error
        _check_stored(model.config, cache)
        _check_continues(model)
    _CHECKED.add(model)


def _check_stored(config: PreTrainedConfig, cache: EvictingCache) -> None:
    """Raise ModelError unless every layer to evict from holds one token of the heads expected."""
    geometry = geometry_of(config)
    expected = (1, geometry.kv_heads, 1, geometry.head_dim)
    layers = cache.stored
    shapes = {tuple(x.shape) for layer in layers.values() for x in (layer.keys, layer.values)}
    if tuple(layers) != tuple(geometry.model_layers) or shapes != {expected}:
        sizes = " and ".join(f"{heads} x {width}" for _, heads, _, width in sorted(shapes))
        raise ModelError(
            f"model type {config.model_type!r} caches keys and values of {sizes} numbers per "
            f"token, where kvp expects {geometry.kv_heads} x {geometry.head_dim} for both: choose "
            "another model"
        )


def _check_continues(model: PreTrainedModel) -> None:
    """Raise ModelError where recurrent layers lose their state when several tokens are fed at once.

    Some classes of transformers continue from a state by single tokens alone (Jamba), but kvp feeds
    the rest of a prompt in one piece. The check runs the model without eviction.
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
        raise ModelError(
            f"{type(model).__name__} does not continue its recurrent layers when several tokens "
            "are fed at once, in this version of transformers: choose another model"
        )


def check_weights(model: PreTrainedModel, name: str, *, missing: Collection[str]) -> None:
    """Raise ModelError naming a weight that is missing (transformers draws it) or not finite."""
    if missing:
        raise ModelError(
            f"--model {name}: {len(missing)} weights are missing from its files, among them "
            f"{min(missing)}: download or save the model again"
        )
    for key, weight in model.named_parameters():
        if not weight.is_floating_point():
            continue
        # A sum keeps NaN and infinity, and holds no mask of the weight's size.
        if not bool(weight.detach().sum(dtype=torch.float32).isfinite()):
            raise ModelError(
                f"--model {name}: weight {key} holds NaN or infinity: download or save the model "
                "again"
            )
