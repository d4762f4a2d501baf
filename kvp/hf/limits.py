"""Lengths at which a model begins to compute attention in another way."""

from __future__ import annotations

from transformers import PreTrainedConfig

from kvp.hf.layer_kinds import SLIDING, layer_kinds


def rope_switch(config: PreTrainedConfig | None) -> int | None:
    """Tokens after which the model changes its RoPE (LongRoPE), or None.

    Keys cached before that length are wrong for queries after it.
    """
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
