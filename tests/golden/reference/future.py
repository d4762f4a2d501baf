"""Methods that guess queries to come: Expected Attention and GVote."""

import numpy as np

from reference.attention import last_attention, softmax
from reference.ranking import FORCED


def mean_rotation(inputs, future):
    """[D, D] matrix that moves a query to the average of the `future` positions after the cache."""
    tokens, width = inputs.shape[2], inputs.shape[3]
    half = width // 2
    matrix = np.zeros((width, width))
    for position in range(tokens, tokens + future):
        angles = position * inputs.frequencies
        for channel in range(half):
            cosine, sine = np.cos(angles[channel]), np.sin(angles[channel])
            matrix[channel, channel] += cosine
            matrix[channel, channel + half] -= sine
            matrix[channel + half, channel + half] += cosine
            matrix[channel + half, channel] += sine
    return matrix / future


def expected_attention(
    inputs, budget, sinks=4, future=512, epsilon=0.01, *, covariance=True, values=True
):
    """Mean attention a Gaussian query of the future pays, times the value's norm."""
    batch, heads, tokens, width = inputs.shape
    scores = np.zeros((batch, heads, tokens))
    scores[..., :sinks] = FORCED + np.arange(min(sinks, tokens))
    if tokens <= sinks:
        return scores
    rotation = mean_rotation(inputs, future)
    plain = inputs.project(inputs.hidden)[:, :, sinks:]
    for b, h in np.ndindex(batch, heads):
        keys = inputs.keys[b, h, sinks:].astype(np.float64)
        total = np.zeros(tokens - sinks)
        for query_head in range(h * inputs.group, (h + 1) * inputs.group):
            queries = plain[b, query_head]
            mean = rotation @ queries.mean(axis=0)
            spread = rotation @ np.cov(queries.T, bias=True) @ rotation.T
            logits = keys @ mean / np.sqrt(width)
            if covariance:
                logits = logits + np.array([k @ spread @ k for k in keys]) / (2 * width)
            total += softmax(logits) / inputs.group
        norms = np.linalg.norm(inputs.values[b, h, sinks:].astype(np.float64), axis=-1)
        scores[b, h, sinks:] = (total + epsilon) * norms if values else total
    return scores


def nucleus(attention, p_nuc):
    """Size of the smallest set of tokens that holds `p_nuc` of the attention [N]."""
    cumulative = np.cumsum(np.sort(attention)[::-1])
    return min(int((cumulative < p_nuc).sum()) + 1, len(attention))


def gvote(inputs, budget, p_nuc=0.95, future=512, *, include_current=True, guesses=None):
    """Votes of the group plus mean attention of the guessed queries.

    `guesses` [B, Q, S, D] before RoPE; else those the product drew (`Inputs.drawn`).
    """
    batch, heads, tokens, width = inputs.shape
    if guesses is None:
        guesses = inputs.project(np.concatenate(inputs.drawn, axis=1))
    guesses = guesses @ mean_rotation(inputs, future).T
    current = last_attention(inputs, 1)[..., 0, :]
    scores = np.zeros((batch, heads, tokens))
    for b, h in np.ndindex(batch, heads):
        keys = inputs.keys[b, h].astype(np.float64)
        for g in range(inputs.group):
            size = nucleus(current[b, h, g], p_nuc)
            if include_current:
                scores[b, h, _best(current[b, h, g], size)] += 1
            drawn = guesses[b, h * inputs.group + g]
            for query in drawn:
                attention = softmax(keys @ query / np.sqrt(width))
                scores[b, h, _best(attention, size)] += 1
                scores[b, h] += attention / (len(drawn) * inputs.group)
    return scores


def _best(weights, size):
    """The `size` heaviest tokens, equal ones newest first."""
    return np.lexsort((-np.arange(len(weights)), -np.round(weights, 14)))[:size]
