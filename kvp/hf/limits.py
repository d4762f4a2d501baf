"""Lengths at which a model begins to compute attention in another way."""

from __future__ import annotations

from transformers import PreTrainedConfig


def rope_switch(config: PreTrainedConfig | None) -> int | None:
    """Tokens after which the model changes its RoPE (LongRoPE), or None.

    Keys cached before that length are wrong for queries after it.
    """
    rope = getattr(config, "rope_parameters", None) or {}
    if rope.get("rope_type") != "longrope":
        return None
    return int(rope["original_max_position_embeddings"])


def attention_window(config: PreTrainedConfig | None) -> int | None:
    """Tokens that a query sees in every layer, or None without a sliding window.

    Where the config lists a kind for each layer, that list counts instead.
    """
    if config is None or "layer_types" in vars(config):
        return None
    window = getattr(config, "sliding_window", None)
    return None if window is None else int(window)
