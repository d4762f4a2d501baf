"""Expected Attention (arXiv 2510.00636): the attention a Gaussian future query would pay.

Formula and published settings: docs/methods/expected_attention.md. Queries are read after RoPE and
turned back: hidden states are not needed, traces will do. If every token is a sink: recency.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from kvp.bounds import NotNegative, Positive, Weight
from kvp.scoring import ALL_QUERIES, Needs, View
from policies.base import BaseScorer, Grid, Presets
from policies.queries import mean_future_rotation, query_moments


@dataclass(frozen=True, kw_only=True)
class ExpectedAttention(BaseScorer):
    """Keep what queries like the past ones would attend to."""

    future: Positive = 512
    """Positions after the prompt over which the rotation is averaged."""
    sinks: NotNegative = 4
    """First tokens, left out of the statistics and ranked first."""
    covariance: bool = True
    """Use the spread of the queries, not only their mean."""
    values: bool = True
    epsilon: Weight = 0.01
    """Added to the expected attention before the norm of the value."""

    base_name: ClassVar[str] = "expected_attention"
    cost: ClassVar[str] = "moments of the queries, one pass over the keys, O(G N D D)"
    presets: ClassVar[Presets] = {"kvpress": {"epsilon": 0.0}}
    grid: ClassVar[Grid] = {
        "epsilon": (0.0, 0.001, 0.01, 0.1, 1.0),
        "values": (True, False),
        "covariance": (True, False),
        "future": (64, 128, 256, 512, 1024),
        "sinks": (0, 1, 4, 16),
    }

    needs = Needs(queries=ALL_QUERIES, rope=True)

    def score(self, view: View) -> Tensor:
        """Expected attention times value norm, sinks above all: [B, H, N] float32."""
        rope = view.rope
        assert rope is not None
        scores = torch.ones(view.keys.shape[:3], device=view.keys.device)
        if view.keys.shape[2] <= self.sinks:
            return scores
        mean, covariance = query_moments(view, rope, self.sinks)
        cosine, sine = mean_future_rotation(view, rope, self.future)
        mean = rope.rotate(mean[:, :, None], cosine, sine)[:, :, 0]  # [B, Q, D]
        half = rope.rotate(covariance, cosine, sine).transpose(-1, -2)
        spread = rope.rotate(half, cosine, sine)  # [B, Q, D, D], R S R^T
        keys = view.keys[:, :, self.sinks :].float()
        heads, width = keys.shape[1], keys.shape[-1]
        grouped = torch.unflatten(mean, 1, (heads, -1))  # [B, H, G, D]
        logits = (grouped @ keys.transpose(-1, -2)) * width**-0.5  # [B, H, G, N]
        if self.covariance:
            spreads = torch.unflatten(spread, 1, (heads, -1))
            for member in range(spreads.shape[2]):
                form = ((keys @ spreads[:, :, member]) * keys).sum(dim=-1)  # [B, H, N]
                logits[:, :, member] += form / (2 * width)
        expected = logits.softmax(dim=-1).mean(dim=2)  # over query heads, [B, H, N]
        if self.values:
            norms = torch.linalg.vector_norm(view.values[:, :, self.sinks :].float(), dim=-1)
            expected = (expected + self.epsilon) * norms
        scores[..., self.sinks :] = expected
        scores[..., : self.sinks] = expected.amax(dim=(1, 2), keepdim=True) + 1
        return scores
