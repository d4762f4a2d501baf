"""The distribution of the queries to come, as Expected Attention and GVote guess it from the past.

Queries are brought back to where they stood before RoPE, which needs no hidden states: it works on
stored traces, too. Then the rotation is averaged over the positions to come.
"""

import torch
from torch import Tensor

from kvp.rope import Rope
from kvp.scoring import View


def query_moments(view: View, rope: Rope, skip: int) -> tuple[Tensor, Tensor]:
    """Mean [B, Q, D] and biased covariance [B, Q, D, D] of all queries of a view before RoPE.

    The first `skip` tokens, fewer than there are, are left out. Needs every query (`ALL_QUERIES`).
    One query head at a time, so memory stays at [B, N, D] float32.
    """
    assert view.queries is not None
    cosine, sine = rope.inverse(view.positions[:, skip:])
    means, covariances = [], []
    for head in range(view.queries.shape[1]):
        plain = rope.rotate(view.queries[:, head, skip:].float(), cosine, sine)
        mean = plain.mean(dim=1)
        centred = plain - mean[:, None]
        means.append(mean)
        covariances.append(centred.transpose(1, 2) @ centred / plain.shape[1])
    return torch.stack(means, dim=1), torch.stack(covariances, dim=1)


def mean_future_rotation(view: View, rope: Rope, future: int) -> tuple[Tensor, Tensor]:
    """Cosine and sine [B, 1, 1, R / 2], averaged over the `future` positions after the cache."""
    cosine, sine = rope.mean_rotation(view.positions[:, -1] + 1, future)
    return cosine[:, None, None], sine[:, None, None]
