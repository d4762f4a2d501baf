"""Head geometry of a transformers model."""

from __future__ import annotations

from transformers import PreTrainedConfig

from kvp.errors import ModelError
from kvp.geometry import Geometry
from kvp.hf.layer_kinds import evicted_layers, layer_kinds


def geometry_of(config: PreTrainedConfig) -> Geometry:
    """Head geometry of the layers that tokens are evicted from (`kvp.hf.layer_kinds`).

    Raises ModelError when a model has no such layer, or when they are not all alike.
    """
    text = config.get_text_config(decoder=True)
    try:
        evicted = evicted_layers(config)
        if not evicted:
            raise ValueError(f"{', '.join(sorted(set(layer_kinds(config))))}")
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
    except (AttributeError, TypeError, ValueError) as error:
        raise ModelError(
            f"model type {config.model_type!r} has no uniform attention heads to evict from "
            f"({error})"
        ) from error


def _heads(layer: PreTrainedConfig) -> tuple[int, int, int]:
    """Query heads, KV heads and head dimension of one layer."""
    query_heads = layer.num_attention_heads
    kv_heads = getattr(layer, "num_key_value_heads", None)
    head_dim = getattr(layer, "head_dim", None)
    return (
        query_heads,
        query_heads if kv_heads is None else kv_heads,
        layer.hidden_size // query_heads if head_dim is None else head_dim,
    )
