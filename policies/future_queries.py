"""Distribution of the queries after the prompt, moved to their positions.

Shared by the methods that guess the future from the past (Expected Attention, GVote). Queries are
brought back to where they stood before RoPE, which needs no hidden states: it works on stored
traces, too. Then the rotation is averaged over the positions to come.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvp.errors import UsageError
from kvp.rope import Rope
from kvp.scoring import View


@dataclass(frozen=True, kw_only=True)
class QueryMoments:
    """Queries of a view before RoPE, as a distribution per query head."""

    mean: Tensor
    """[B, Q, D] float32."""
    covariance: Tensor
    """[B, Q, D, D] float32, biased (divided by the number of tokens)."""


def view_rope(view: View, method: str) -> Rope:
    """The view's rotary embedding; UsageError where the view has none."""
    if view.rope is None:
        raise UsageError(
            f"{method}: this view carries no rotary embedding, which the method needs: use a model "
            "with RoPE, or traces that store it"
        )
    return view.rope


def query_moments(view: View, rope: Rope, skip: int) -> QueryMoments:
    """Mean and covariance of all queries of a view before RoPE, first `skip` tokens left out.

    Needs every query (`ALL_QUERIES`) and more than `skip` tokens. One query head at a time, so
    memory stays at [B, N, D] float32.
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
    return QueryMoments(mean=torch.stack(means, dim=1), covariance=torch.stack(covariances, dim=1))


def mean_future_rotation(view: View, rope: Rope, future: int) -> tuple[Tensor, Tensor]:
    """Cosine and sine [B, 1, 1, R / 2], averaged over the `future` positions after the cache."""
    cosine, sine = rope.mean_rotation(view.positions[:, -1] + 1, future)
    return cosine[:, None, None], sine[:, None, None]
