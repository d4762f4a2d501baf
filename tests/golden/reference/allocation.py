"""How budgets are split over layers and heads, in plain Python and float64 NumPy.

Scores are [L, H, N] with protected tokens at +inf; every function returns counts [L, H].
"""

import math
from fractions import Fraction

import numpy as np


def best_tokens(scores, total, guaranteed):
    """Of heads [U, N] that compete: the best `guaranteed` of each, then the best of all. [U]

    Ties go to the newer token, then to the earlier head.
    """
    heads, tokens = scores.shape
    everything = [(-scores[h, i], -i, h) for h in range(heads) for i in range(tokens)]
    counts = [guaranteed] * heads
    rest = []
    for h in range(heads):
        of_head = sorted(entry for entry in everything if entry[2] == h)
        rest += of_head[guaranteed:]
    for _, _, h in sorted(rest)[: total - heads * guaranteed]:
        counts[h] += 1
    return np.array(counts)


def uniform(scores, budget, floor):
    return np.full(scores.shape[:2], budget)


def whole(scores, budget, floor, first):
    """The first layers whole; the others share what is left, but have no less than the floor."""
    layers, heads, tokens = scores.shape
    first = min(first, layers)
    others = layers - first
    beyond = layers * budget - others * floor  # what the first layers could have
    low = min(beyond, first * tokens)
    parts = [(low, first), (layers * budget - low, others)]
    counts = [total // n + (i < total % n) for total, n in parts for i in range(n)]
    return np.repeat(np.array(counts)[:, None], heads, axis=1)


def ada(scores, budget, floor, safeguard=0.2):
    safe = max(floor, int(safeguard * budget))
    heads = scores.shape[1]
    return np.stack([best_tokens(layer, heads * budget, safe) for layer in scores])


def over_all(scores, budget, floor, safeguard=0.2):
    layers, heads, tokens = scores.shape
    safe = max(floor, int(safeguard * budget))
    flat = scores.reshape(layers * heads, tokens)
    return best_tokens(flat, layers * heads * budget, safe).reshape(layers, heads)


def largest_remainder(shares, total):
    """Shares that already sum to `total`, rounded to integers that do; ties to the first."""
    down = [math.floor(share) for share in shares]
    by_remainder = sorted(range(len(shares)), key=lambda i: (down[i] - shares[i], i))
    for i in by_remainder[: total - sum(down)]:
        down[i] += 1
    return down


def falling(first, last, points):
    if points == 1:
        return [(first + last) / 2]
    return [first - k * (first - last) / (points - 1) for k in range(points)]


def pyramid(layers, tokens, budget, window=8, beta=20):
    """PyramidKV with the exact sum, where no layer meets its bounds."""
    base = Fraction(budget - window)
    low = base / beta
    high = 2 * base - low
    if high > tokens - window:
        high = Fraction(tokens - window)
        low = 2 * base - high
    shares = [window + share for share in falling(high, low, layers)]
    return largest_remainder(shares, layers * budget)


def group_of(layers, gamma):
    return [layer // gamma for layer in range(layers)]


def windowkv(layers, budget, gamma, divisor=14, *, code=True):
    """WindowKV's falling budgets with the exact sum."""
    top = Fraction(budget * (gamma if code else 1), divisor)
    groups = -(-layers // gamma)
    per_group = falling(2 * budget - top, top, groups)
    shares = [per_group[group] for group in group_of(layers, gamma)]
    return largest_remainder(shares, layers * budget)


def completed(counts, budget, *, exact):
    """EvolKV: counts of a search scaled to another budget; rounded up as published, or exact."""
    total = budget * len(counts)
    shares = [Fraction(count * total, sum(counts)) for count in counts]
    if exact:
        return largest_remainder(shares, total)
    return [math.ceil(share) for share in shares]


def kept_tokens(tokens, ratio):
    """Tokens per head that kvpress keeps: truncated, in binary floating point, at least one."""
    return max(1, int(tokens * (1 - ratio)))


def kvpress_ada(scores, ratio, safeguard=0.2):
    """Mask [B, H, T] of what a layer keeps in kvpress 0.5.5; `ratio` is the share dropped."""
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


def kvpress_kvzip(scores, ratio):
    """Entries that kvpress keeps per layer, of scores [L, H, T] with sinks already at the top."""
    layers = scores.shape[0]
    pruned = int(ratio * scores.size)
    dropped = np.argsort(scores.ravel(), kind="stable")[:pruned] // scores[0].size
    per_layer = np.bincount(dropped, minlength=layers)
    return [scores[0].size - int(count) for count in per_layer]
