"""WindowKV: whole windows by what the last tokens attend to."""

import numpy as np

from reference.attention import last_attention
from reference.ranking import FORCED


def windowkv(inputs, budget, observed=4, window=32, top=32, *, per_head=False):
    """Rank of the token's window plus its attention; observation tokens above, newest first.

    The same for every head of the layer.
    """
    batch, heads, tokens, _ = inputs.shape
    scores = FORCED + np.broadcast_to(np.arange(tokens, dtype=float), (batch, heads, tokens))
    before = tokens - observed
    if before <= 0:
        return scores
    attention = last_attention(inputs, observed)[..., :before].mean(axis=3)
    for b in range(batch):
        every_head = attention[b].reshape(-1, before)
        votes = every_head.mean(axis=0)
        starts = range(0, before, window)

        def window_score(x, start):
            best = np.sort(x[start : start + window])[::-1][:top]
            return float(best.sum() / min(top, window))

        if per_head:
            marks = [np.mean([window_score(x, s) for x in every_head]) for s in starts]
        else:
            marks = [window_score(votes, s) for s in starts]
        marks = list(np.round(marks, 14))
        worst_first = sorted(range(len(marks)), key=lambda k: (marks[k], k))
        for rank, k in enumerate(worst_first):
            part = slice(k * window, min((k + 1) * window, before))
            scores[b, :, part] = rank + votes[part]
    return scores
