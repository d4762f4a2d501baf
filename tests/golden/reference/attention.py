"""Causal softmax attention in float64."""

import numpy as np


def softmax(logits):
    """Softmax over the last axis."""
    weights = np.exp(logits - logits.max(axis=-1, keepdims=True))
    return weights / weights.sum(axis=-1, keepdims=True)


def last_attention(inputs, window):
    """What the last `window` tokens attend to: [B, H, G, window, N]."""
    batch, heads, tokens, width = inputs.shape
    queries = inputs.queries[:, :, tokens - window :].astype(np.float64)
    queries = queries.reshape(batch, heads, inputs.group, window, width)
    keys = inputs.keys.astype(np.float64)
    logits = np.einsum("bhgwd,bhnd->bhgwn", queries, keys) / np.sqrt(width)
    future = np.arange(tokens) > np.arange(tokens - window, tokens)[:, None]
    return softmax(np.where(future, -np.inf, logits))
