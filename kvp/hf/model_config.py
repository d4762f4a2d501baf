"""What a configuration tells: kinds of layers, heads, and the lengths that a model reaches.

Tokens are evicted from layers that see every earlier token. Layers with a sliding window, with
chunks, with a recurrent or convolution state, and those without a cache keep the cache that
transformers gives them, and kvp never touches it. Reasons: `docs/decisions.md#hybrid-models`.
"""

from transformers import PreTrainedConfig
from transformers.cache_utils import get_layer_types_and_kwargs

from kvp.errors import ModelError
from kvp.geometry import Geometry


def rope_switch(config: PreTrainedConfig | None) -> int | None:
    """Tokens after which LongRoPE changes, so that earlier keys are wrong; None without it."""
    rope = getattr(config, "rope_parameters", None) or {}
    if rope.get("rope_type") != "longrope":
        return None
    return int(rope["original_max_position_embeddings"])


def attention_window(config: PreTrainedConfig | None) -> int | None:
    """Tokens that a query sees in every layer, or None where some layer sees all of them."""
    window = getattr(config, "sliding_window", None)
    if config is None or window is None or set(layer_kinds(config)) != {SLIDING}:
        return None
    return int(window)


def context_limit(config: PreTrainedConfig) -> int | None:
    """Most tokens of a prompt and its answer, or None where the config names no limit."""
    text = config.get_text_config(decoder=True)
    limits = (getattr(text, "max_position_embeddings", None), attention_window(text))
    return min((int(limit) for limit in limits if limit is not None), default=None)


FULL_ATTENTION = "full_attention"
SLIDING = "sliding_attention"
LEFT_ALONE = frozenset({SLIDING, "chunked_attention", "linear_attention", "conv", "dummy"})
"""Kinds of layers whose caches kvp can copy and leave alone, as transformers names them."""


def layer_kinds(config: PreTrainedConfig) -> tuple[str, ...]:
    """The kind of every layer, `dummy` for those that own no cache; ModelError if unknown."""
    text = config.get_text_config(decoder=True)
    try:
        kinds, _ = get_layer_types_and_kwargs(text)
    except (AttributeError, TypeError, ValueError) as error:
        raise ModelError(
            f"model type {config.model_type!r} does not tell the kinds of its layers ({error})"
        ) from error
    return tuple(kinds)


def evicted_layers(config: PreTrainedConfig) -> tuple[int, ...]:
    """Indices of the layers that see every token; empty where a model has none.

    Where every layer has the same sliding window, all layers count: they see every token of a
    prompt that is shorter than the window (`attention_window`).
    """
    kinds = layer_kinds(config)
    if set(kinds) == {SLIDING}:
        return tuple(range(len(kinds)))
    return tuple(index for index, kind in enumerate(kinds) if kind == FULL_ATTENTION)


def geometry_of(config: PreTrainedConfig) -> Geometry:
    """Head geometry of `evicted_layers`; ModelError where there are none, or they are not alike."""
    text = config.get_text_config(decoder=True)
    try:
        evicted = evicted_layers(config)
        if not evicted:
            raise ValueError(", ".join(sorted(set(layer_kinds(config)))))
        alike = {_heads(text.per_layer_config[index]) for index in evicted}
        if len(alike) > 1:
            raise ValueError(f"its layers have {len(alike)} kinds of heads")
        query_heads, kv_heads, head_dim = alike.pop()
        return Geometry(
            layers=len(evicted),
            query_heads=query_heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            layer_indices=evicted,
        )
    except (AttributeError, TypeError, ValueError, ZeroDivisionError) as error:
        raise ModelError(
            f"model type {config.model_type!r} has no uniform attention heads to evict from "
            f"({error})"
        ) from error


def _heads(layer: PreTrainedConfig) -> tuple[int, int, int]:
    """Query heads, KV heads and head dimension of one layer."""
    query_heads = layer.num_attention_heads
    kv_heads = getattr(layer, "num_key_value_heads", None)
    head_dim = getattr(layer, "head_dim", None)
    kv_heads = query_heads if kv_heads is None else kv_heads
    head_dim = layer.hidden_size // query_heads if head_dim is None else head_dim
    return query_heads, kv_heads, head_dim


def check_config(config: PreTrainedConfig) -> None:
    """Raise ModelError unless some layers have full softmax attention and others can be copied."""
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
    if any(mode == "reuse" and listed[i] == FULL_ATTENTION for i, mode in enumerate(modes)):
        raise ModelError(
            f"{kind} has layers with full attention that read the cache of another one: kvp ranks "
            "tokens for one layer at a time, choose a model whose layers own their caches"
        )
