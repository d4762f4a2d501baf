"""kvpress 0.5.5 by its formulas: scores [B, H, T] (or masks) that its top-k selection reads.

Written from a description of that package, in float64; nothing of it is imported. `ratio` is its
compression ratio, the share dropped. Its truncation (`kept_tokens`) is part of the contract.
"""

import numpy as np

from reference.attention import last_attention, softmax


def kept_tokens(tokens, ratio):
    """Tokens per head: truncated, in binary floating point, at least one."""
    return max(1, int(tokens * (1 - ratio)))


def _padded(scores, *, front=0, back=0):
    """Add tokens that are always kept: one above the maximum over batch, heads and positions."""
    top = scores.max() + 1
    return np.pad(scores, ((0, 0), (0, 0), (front, back)), constant_values=top)


def knorm(inputs):
    return -np.linalg.norm(inputs.keys.astype(np.float64), axis=-1)


def keydiff(inputs):
    keys = inputs.keys.astype(np.float64)
    directions = keys / np.linalg.norm(keys, axis=-1, keepdims=True)
    anchor = directions.mean(axis=2, keepdims=True)
    return -(directions * anchor).sum(-1) / np.linalg.norm(anchor, axis=-1)


def streaming_llm(inputs, ratio):
    batch, heads, tokens, _ = inputs.shape
    scores = np.ones((batch, heads, tokens))
    scores[..., 4 : 4 + tokens - int(tokens * (1 - ratio))] = 0
    return scores


def snapkv(inputs, window=64, kernel=5):
    tokens = inputs.shape[2]
    votes = last_attention(inputs, window)[..., : tokens - window].mean(axis=3)
    edges = [(0, 0)] * 3 + [(kernel // 2, kernel // 2)]
    shifted = np.pad(votes, edges)
    pooled = sum(shifted[..., k : k + votes.shape[-1]] for k in range(kernel)) / kernel
    return _padded(pooled.mean(axis=2), back=window)


def tova(inputs):
    last = last_attention(inputs, 1)[:, :, :, 0, :-1].mean(axis=(1, 2))
    heads = inputs.shape[1]
    return _padded(np.repeat(last[:, None], heads, axis=1), back=1)


def observed_attention(inputs):
    tokens = inputs.shape[2]
    matrix = last_attention(inputs, tokens)
    return (matrix.sum(axis=3) / np.arange(tokens, 0, -1)).mean(axis=2)


def lagkv(inputs, sinks=4, lag=128):
    batch, heads, tokens, width = inputs.shape
    scores = np.ones((batch, heads, tokens))
    if tokens < sinks + 2 * lag:
        scores[..., sinks:] = np.arange(tokens - sinks) / (tokens - sinks)
        return scores
    partitions = (tokens - sinks) // lag
    halves = []
    for states in (inputs.keys, inputs.values):
        body = states[:, :, sinks : sinks + partitions * lag].astype(np.float64)
        parts = body.reshape(batch, heads, partitions, lag, width)
        low, high = (f(parts[:, :, 1:], axis=3, keepdims=True) for f in (np.min, np.max))
        halves.append(softmax(((parts[:, :, :-1] - low) / (high - low)).std(-1, ddof=1)))
    ranks = (halves[0] + halves[1]).argsort(-1).argsort(-1) / lag
    scores[..., sinks : sinks + (partitions - 1) * lag] = ranks.reshape(batch, heads, -1)
    return scores


def expected_attention(inputs, sinks=4, future=512, *, covariance=True, epsilon=0.0):
    batch, heads, tokens, width = inputs.shape
    plain = inputs.project(inputs.hidden)[:, :, sinks:]
    mean = plain.mean(axis=2)
    centred = plain - mean[:, :, None]
    spread = np.einsum("bqni,bqnj->bqij", centred, centred) / (tokens - sinks)

    half = width // 2
    turn = np.zeros((width, width))  # x -> (-x2, x1)
    turn[:half, half:], turn[half:, :half] = -np.eye(half), np.eye(half)
    angles = np.arange(tokens, tokens + future)[:, None] * inputs.frequencies
    cosine = np.tile(np.cos(angles).mean(axis=0), 2)
    sine = np.tile(np.sin(angles).mean(axis=0), 2)
    rotation = np.diag(cosine) + np.diag(sine) @ turn
    mean = mean @ rotation.T
    spread = rotation @ spread @ rotation.T

    keys = np.repeat(inputs.keys[:, :, sinks:].astype(np.float64), inputs.group, axis=1)
    logits = np.einsum("bqnd,bqd->bqn", keys, mean) / np.sqrt(width)
    if covariance:
        logits += np.einsum("bqni,bqij,bqnj->bqn", keys, spread, keys) / (2 * width)
    weights = softmax(logits).reshape(batch, heads, inputs.group, -1).mean(axis=2)
    norms = np.linalg.norm(inputs.values[:, :, sinks:].astype(np.float64), axis=-1)
    return _padded((weights + epsilon) * norms, front=sinks)


def adakv(scores, ratio, safeguard=0.2):
    """Mask [B, H, T] of what a layer keeps."""
    batch, heads, tokens = scores.shape
    kept = kept_tokens(tokens, ratio)
    safe = max(1, int(safeguard * kept))
    raised = scores.astype(np.float64).copy()
    best = np.argsort(-raised, axis=-1, kind="stable")[..., :safe]
    np.put_along_axis(raised, best, np.inf, axis=-1)
    mask = np.ones((batch, heads * tokens), dtype=bool)
    pruned = heads * (tokens - kept)
    for entry in range(batch):
        mask[entry, np.argsort(raised[entry].ravel(), kind="stable")[:pruned]] = False
    return mask.reshape(batch, heads, tokens)


def kvzip_counts(scores, ratio):
    """Entries kept per layer, of scores [L, H, T] with sinks already at the top."""
    layers = scores.shape[0]
    pruned = int(ratio * scores.size)
    dropped = np.argsort(scores.ravel(), kind="stable")[:pruned] // scores[0].size
    per_layer = np.bincount(dropped, minlength=layers)
    return [scores[0].size - int(count) for count in per_layer]
