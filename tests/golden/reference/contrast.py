"""ContrastKV: the two fusions, and the order that remains where they tie."""

import numpy as np


def fused(positive, negative, beta, gamma, *, per_head=False):
    """Fused scores [B, H, N] of one layer (Eq. 9 and 10)."""
    result = np.empty(positive.shape)
    gated = beta > 0 and positive.shape[-1] >= 20
    for b in range(positive.shape[0]):
        for h in range(positive.shape[1]):
            pos, neg = positive[b, h], negative[b, h]
            layer_pos = pos if per_head else positive[b]
            layer_neg = neg if per_head else negative[b]
            spread = layer_neg.max() - layer_neg.min()
            scaled = (neg - layer_neg.min()) / spread if spread > 0 else np.zeros_like(neg)
            value = np.minimum(pos + gamma * scaled, layer_pos.max())
            if gated:
                high, low = (
                    [x >= np.quantile(x, 1 - beta) for x in (pos, neg)],
                    [x <= np.quantile(x, beta) for x in (pos, neg)],
                )
                value[low[0] & low[1]] = 0.0
                value[high[0] & high[1]] = 1.0
            result[b, h] = value
    return result


def contrastkv(inputs, budget, beta=0.1, gamma=0.12, *, per_head=False):
    """Scores in the order of (fused score, positive signal), spread out so that margins show.

    Fused scores tie at three values: at 1, at 0, and at the cap max(S+). There the positive signal
    decides, so it is written above 10, below -5 and above 5.
    """
    positive, negative = inputs.reconstruction.astype(np.float64), inputs.noise.astype(np.float64)
    value = fused(positive, negative, beta, gamma, per_head=per_head)
    cap = positive.max(axis=-1 if per_head else (-2, -1), keepdims=True)
    spread = np.where(value == cap, 5 + positive, value)
    spread = np.where(value == 0, -6 + positive, spread)
    return np.where(value == 1, 10 + positive, spread)
