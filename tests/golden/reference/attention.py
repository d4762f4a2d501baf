"""Causal softmax attention in float64."""

from __future__ import annotations

import numpy as np

from reference.inputs import Inputs

Array = np.ndarray


def softmax(logits: Array) -> Array:
    """Softmax over the last axis."""
    weights = np.exp(logits - logits.max(axis=-1, keepdims=True))
    result: Array = weights / weights.sum(axis=-1, keepdims=True)
    return result


def last_attention(inputs: Inputs, window: int) -> Array:
    """What the last `window` tokens attend to: [B, H, G, window, N]."""
    batch, heads, tokens, width = inputs.shape
    queries = inputs.queries[:, :, tokens - window :].astype(np.float64)
    queries = queries.reshape(batch, heads, inputs.group, window, width)
    keys = inputs.keys.astype(np.float64)
    logits = np.einsum("bhgwd,bhnd->bhgwn", queries, keys) / np.sqrt(width)
    future = np.arange(tokens) > np.arange(tokens - window, tokens)[:, None]
    return softmax(np.where(future, -np.inf, logits))
