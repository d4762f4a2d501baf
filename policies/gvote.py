"""GVote (arXiv 2509.03136): guessed future queries vote, and the votes size the cache.

Formula and open points: docs/methods/gvote.md. Tokens with a score >= 1 are GVote's set, `sizes`
counts them, and the ranking goes on below and above that size: (votes, attention, recency). float32
resolves attentions of tokens with v votes to 1e-7 v. Draws depend on (seed, layer, draw) alone, and
are the same in every sequence of a batch.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from kvp.bounds import NotNegative, Positive, Share
from kvp.ops.attention import group_products, recent_attention
from kvp.ranking import rank_tokens
from kvp.rope import Rope
from kvp.scoring import ALL_QUERIES, Needs, View
from policies.base import BaseScorer, Grid, Presets, keyed_generator
from policies.queries import mean_future_rotation, query_moments


@dataclass(frozen=True, kw_only=True)
class GVote(BaseScorer):
    """Keep what guessed future queries vote for; sizes the cache itself."""

    p_nuc: Share = 0.95
    """Share of the last query's attention that k tokens must hold."""
    samples: Positive = 8
    skip: NotNegative = 4
    """First tokens left out of the statistics."""
    future: Positive = 512
    """Positions after the prompt over which the rotation is averaged."""
    include_current: bool = True
    min_keep: Positive = 4
    space: Literal["hidden", "query"] = "hidden"
    """Where queries are drawn: `hidden` states (diagonal) or `query` space (full covariance)."""
    seed: NotNegative = 0

    base_name: ClassVar[str] = "gvote"
    cost: ClassVar[str] = "the attention of the guesses, O(G samples N D)"
    presets: ClassVar[Presets] = {"paper": {"include_current": False}}
    grid: ClassVar[Grid] = {
        "p_nuc": (0.5, 0.8, 0.9, 0.95, 0.99, 1.0),
        "samples": (2, 4, 8, 16, 32),
        "include_current": (True, False),
        "space": ("hidden", "query"),
    }

    @property
    def needs(self) -> Needs:
        """The last query, hidden states and the rotary embedding; or every query instead."""
        if self.space == "query":
            return Needs(queries=ALL_QUERIES, rope=True)
        return Needs(queries=1, rope=True, hidden_after=self.skip)

    def sizes(self, scores: Tensor) -> Tensor:
        """Tokens with a vote, at least `min_keep`: scores [..., N] -> [...] int64."""
        tokens = scores.shape[-1]
        return (scores >= 1).sum(dim=-1).clamp(min(self.min_keep, tokens), tokens)

    def score(self, view: View) -> Tensor:
        """Votes plus mean attention of the guessed queries: [B, H, N] float32."""
        assert view.queries is not None
        if view.keys.shape[2] <= self.skip:
            return torch.ones(view.keys.shape[:3], device=view.keys.device)
        current = recent_attention(view.queries, view.keys, 1).squeeze(-2)  # [B, H, G, N]
        ranking = rank_tokens(current)
        mass = current.gather(-1, ranking).double().cumsum(dim=-1)  # [B, H, G, N] of the best ones
        size = ((mass < self.p_nuc).sum(dim=-1, keepdim=True) + 1).clamp(max=mass.shape[-1])
        votes = torch.zeros_like(current)
        if self.include_current:
            votes += _mark_first(ranking, size)
        attention = torch.zeros_like(current)
        keys, scale = view.keys.float(), view.keys.shape[3] ** -0.5
        for queries in self.sample_queries(view):
            grouped = torch.unflatten(queries * scale, 1, (keys.shape[1], -1))  # [B, H, G, D]
            logits = group_products(grouped[..., None, :], keys).squeeze(-2)  # [B, H, G, N]
            votes += _mark_first(rank_tokens(logits), size)
            attention += logits.softmax(dim=-1)
        mean = attention.mean(dim=2) / self.samples  # [B, H, N]
        return votes.sum(dim=2) + mean.clamp(max=1 - 2**-10)  # less than a vote

    def sample_queries(self, view: View) -> Iterator[Tensor]:
        """Guessed queries [B, Q, D] float32 at the positions to come, one draw at a time."""
        rope = view.rope
        assert rope is not None
        cosine, sine = (part.squeeze(1) for part in mean_future_rotation(view, rope, self.future))
        draws = self._sample_from_queries if self.space == "query" else self._sample_from_states
        for queries in draws(view, rope):
            yield rope.rotate(queries, cosine, sine)

    def _sample_from_states(self, view: View, rope: Rope) -> Iterator[Tensor]:
        hidden = view.hidden
        assert hidden is not None
        mean, deviation = hidden.mean.float(), hidden.variance.float().clamp_min(0).sqrt()
        for sample in range(self.samples):
            noise = self._noise(view.layer, sample, mean.shape[-1]).to(mean.device)
            yield hidden.project((mean + deviation * noise)[:, None])[:, :, 0].float()

    def _sample_from_queries(self, view: View, rope: Rope) -> Iterator[Tensor]:
        mean, covariance = query_moments(view, rope, self.skip)
        values, vectors = torch.linalg.eigh(covariance.double())
        scaled = vectors * values.clamp_min(0).sqrt()[..., None, :]
        root = (scaled @ vectors.mT).float()  # symmetric
        shape = mean.shape[1:]
        for sample in range(self.samples):
            noise = self._noise(view.layer, sample, shape.numel()).to(root.device).view(shape)
            yield mean + (root @ noise[..., None]).squeeze(-1)

    def _noise(self, layer: int, sample: int, count: int) -> Tensor:
        key = f"gvote/{self.seed}/{layer}/{sample}"
        return torch.randn(count, generator=keyed_generator(key))


def _mark_first(ranking: Tensor, size: Tensor) -> Tensor:
    """1.0 for the first `size` [..., 1] tokens of `ranking` [..., N], 0.0 for others: [..., N]."""
    rank = torch.arange(ranking.shape[-1], device=ranking.device)
    kept = (rank < size).float()  # [..., N] by rank
    return torch.zeros_like(kept).scatter_(-1, ranking, kept)
