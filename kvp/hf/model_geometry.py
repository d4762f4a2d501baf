"""Head geometry of a transformers model."""

from __future__ import annotations

from transformers import PreTrainedConfig

from kvp.errors import ModelError
from kvp.geometry import Geometry


def geometry_of(config: PreTrainedConfig) -> Geometry:
    """Head geometry of a model's config; ModelError when it describes no uniform attention."""
    text = config.get_text_config(decoder=True)
    try:
        query_heads = text.num_attention_heads
        kv_heads = getattr(text, "num_key_value_heads", None)
        head_dim = getattr(text, "head_dim", None)
        return Geometry(
            layers=text.num_hidden_layers,
            query_heads=query_heads,
            kv_heads=query_heads if kv_heads is None else kv_heads,
            head_dim=text.hidden_size // query_heads if head_dim is None else head_dim,
        )
    except (AttributeError, TypeError, ValueError) as error:
        raise ModelError(
            f"model type {config.model_type!r} has no uniform attention heads to evict from "
            f"({error})"
        ) from error
