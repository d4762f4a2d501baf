"""Memory of a running model, and how many answers fit into it, from its configuration."""

from __future__ import annotations

import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig
from transformers.initialization import no_init_weights

from kvp.errors import ModelError
from kvp.hf.cache_layers import other_layers
from kvp.hf.model_config import geometry_of
from kvp.progress import quiet_logs
from kvp.store import planned_bytes
from kvp.store.schema import DTYPES

_QUANTISED = {"8bit": 1.0, "4bit": 0.5}
"""Bytes per quantised weight."""


def parameters_of(config: PreTrainedConfig) -> int:
    """Count the weights of a configuration's model on a model without storage.

    Raises ModelError for a configuration that makes no causal language model.
    """
    try:
        with torch.device("meta"), no_init_weights(), quiet_logs():
            model = AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]
            model.tie_weights()
    except (ValueError, KeyError, AttributeError, RuntimeError) as error:
        raise ModelError(f"model type {config.model_type!r} makes no language model") from error
    return sum(weight.numel() for weight in model.parameters())


def running_bytes(
    config: PreTrainedConfig, *, dtype: str, quantization: str, tokens: int, together: int
) -> int:
    """Peak bytes of a model while it traces sequences of so many tokens.

    Weights, activations of a layer, queries, keys and values of a sequence, and keys and values of
    what is decoded `together`, twice while one answer takes another's place.
    """
    text, geometry = config.get_text_config(decoder=True), geometry_of(config)
    itemsize = DTYPES[dtype][0].itemsize
    weights = parameters_of(config) * _QUANTISED.get(quantization, itemsize)
    intermediate = getattr(text, "intermediate_size", None) or 4 * text.hidden_size
    activations: int = tokens * (4 * text.hidden_size + 3 * intermediate) * itemsize
    kv, qkv = (
        planned_bytes(geometry, dtype=dtype, tokens=tokens, store=store) for store in ("kv", "qkv")
    )
    return round(weights) + activations + qkv + 2 * together * kv


_IN_FLIGHT_BYTES = 4 * 2**30
"""Queries, keys and values of the sequences that are decoded together."""
_MOST_TOGETHER = 16
"""Sequences that are decoded together if they are small."""


def default_batch_size(config: PreTrainedConfig, *, dtype: str, max_tokens: int) -> int:
    """Prompts whose answers are decoded together, of sequences of at most `max_tokens`.

    1 for models with layers that nothing is evicted from: they answer one at a time
    (`kvp.hf.trace`). Raises ModelError for a model without a known geometry.
    """
    if other_layers(config):
        return 1
    largest = planned_bytes(geometry_of(config), dtype=dtype, tokens=max_tokens)
    return max(1, min(_MOST_TOGETHER, _IN_FLIGHT_BYTES // largest))
