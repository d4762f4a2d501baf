"""True scores of methods that read keys, values and recorded queries only.

Each function returns [B, H, N] float64; the set a method keeps at `budget` are the `budget` highest
scores, equal ones newest first. Forced tokens lie above `FORCED`, in the order they are admitted.
"""

import numpy as np

from reference.attention import last_attention, softmax
from reference.ranking import FORCED


def _newest_first(inputs):
    batch, heads, tokens, _ = inputs.shape
    return np.broadcast_to(np.arange(tokens, dtype=np.float64), (batch, heads, tokens)).copy()


def streaming_llm(inputs, budget, sinks=4, *, keep_recents=True):
    """Sinks, then recency; at most half of the budget are sinks, or any number."""
    scores = _newest_first(inputs)
    most = min(sinks, budget // 2) if keep_recents else sinks
    for sink in range(min(most, scores.shape[-1])):
        scores[..., sink] = 2 * FORCED - sink
    return scores


def ring(inputs, budget):
    """Slot t mod budget holds token t until it is overwritten: newest first, by simulation."""
    batch, heads, tokens, _ = inputs.shape
    slots = {}
    for token in range(tokens):
        slots[token % budget] = token
    scores = np.full((batch, heads, tokens), -1.0)
    for token in slots.values():
        scores[..., token] = token
    return scores


def knorm(inputs, budget):
    """Minus the Euclidean norm of the key."""
    return -np.sqrt((inputs.keys.astype(np.float64) ** 2).sum(axis=-1))


def keydiff(inputs, budget):
    """Minus the cosine between the key and the mean of all unit keys."""
    keys = inputs.keys.astype(np.float64)
    unit = keys / np.sqrt((keys**2).sum(axis=-1, keepdims=True))
    anchor = unit.mean(axis=-2, keepdims=True)
    length = np.sqrt((anchor**2).sum(axis=-1))
    return -(unit * anchor).sum(axis=-1) / length


def lagkv_spread(inputs, sinks, lag):
    """What LagKV compares: [B, H, scored partitions, lag], keys and values averaged."""
    batch, heads, tokens, width = inputs.shape
    partitions = (tokens - sinks) // lag
    total = np.zeros((batch, heads, partitions - 1, lag))
    for states in (inputs.keys, inputs.values):
        body = states[:, :, sinks : sinks + partitions * lag].astype(np.float64)
        parts = body.reshape(batch, heads, partitions, lag, width)
        for p in range(partitions - 1):
            low = parts[:, :, p + 1].min(axis=-2, keepdims=True)
            high = parts[:, :, p + 1].max(axis=-2, keepdims=True)
            scaled = (parts[:, :, p] - low) / np.maximum(high - low, 1e-6)
            total[:, :, p] += softmax(scaled.std(axis=-1, ddof=1)) / 2
    return total


def _blurred(spread, ranks):
    """Ranks [P, lag] of one head in which float32 may swap two; those differ by next to nothing.

    Where two neighbours of a partition are that close, all tokens of these two ranks are moved to
    the middle, a hair apart, so that a budget that ends among them counts as undecided.
    """
    step = 1 / ranks.shape[-1]
    falling = np.sort(spread, axis=-1)
    gaps = np.diff(falling, axis=-1) / falling[:, 1:]
    result = ranks.copy()
    for lower in sorted(set(np.nonzero((gaps > 1e-13) & (gaps < 3e-6))[1])):
        zone = np.abs(ranks - (lower + 0.5) * step) < 0.6 * step
        result[zone] = (lower + 0.5) * step + 1e-9 * np.arange(zone.sum())
    return result


def lagkv(inputs, budget, sinks=4, lag=None):
    """Rank within the partition / lag; the tail newest first, sinks before it."""
    lag = min(128, max(4, budget // 4)) if lag is None else lag
    scores = FORCED + _newest_first(inputs)  # a short cache, or the tail
    tokens = scores.shape[-1]
    if tokens >= sinks + 2 * lag:
        spread = lagkv_spread(inputs, sinks, lag)
        # Equal spreads: the newer token ranks higher, as everywhere.
        ranks = np.argsort(np.argsort(spread, axis=-1, kind="stable"), axis=-1)
        for b, h in np.ndindex(ranks.shape[:2]):
            blurred = _blurred(spread[b, h], ranks[b, h] / lag)
            scores[b, h, sinks : sinks + blurred.size] = blurred.ravel()
    for sink in range(min(sinks, tokens)):
        scores[..., sink] = 3 * FORCED - sink
    return scores


def snapkv(inputs, budget, window=None, kernel=5, pool="max"):
    """Window attention per query head, mean over the window, pooled, mean over the group."""
    window = min(32, max(1, budget // 4)) if window is None else window
    scores = FORCED + _newest_first(inputs)
    before = scores.shape[-1] - window
    if before <= 0:
        return scores
    votes = last_attention(inputs, window)[..., :before].mean(axis=-2)
    reach = kernel // 2
    pooled = np.zeros_like(votes)
    for token in range(before):
        near = votes[..., max(token - reach, 0) : token + reach + 1]
        pooled[..., token] = near.max(axis=-1) if pool == "max" else near.sum(axis=-1) / kernel
    scores[..., :before] = pooled.mean(axis=2)
    return scores


def tova(inputs, budget, *, per_kv_head=False, force_last=False):
    """The last token's attention, averaged over the layer's query heads."""
    attention = last_attention(inputs, 1)[..., 0, :]
    scores = attention.mean(axis=2)
    if not per_kv_head:
        scores = np.broadcast_to(scores.mean(axis=1, keepdims=True), scores.shape).copy()
    if force_last:
        scores[..., -1] = FORCED
    return scores


def received(inputs, *, visible):
    """Attention received from all queries, mean over the group; per query that sees the token."""
    tokens = inputs.shape[2]
    sums = last_attention(inputs, tokens).sum(axis=-2)
    if visible:
        sums = sums / (tokens - np.arange(tokens))
    return sums.mean(axis=2)


def h2o(inputs, budget, *, visible=False):
    """Half of the budget (rounded down) newest tokens, the rest heavy hitters."""
    scores = received(inputs, visible=visible)
    recent = budget // 2
    scores[..., scores.shape[-1] - recent :] = FORCED
    return scores


def h2o_window(inputs, budget, window=32):
    """The last `window` tokens, the rest heavy hitters by raw sums."""
    scores = received(inputs, visible=False)
    recent = min(window, scores.shape[-1])
    scores[..., scores.shape[-1] - recent :] = FORCED + np.arange(recent)
    return scores


def oracle(inputs, budget):
    """The future importance itself."""
    return inputs.future.astype(np.float64)


def kvzip(inputs, budget, forced=0):
    """The replay's attention itself; the first `forced` tokens stay."""
    scores = inputs.reconstruction.astype(np.float64)
    scores[..., :forced] = FORCED
    return scores
