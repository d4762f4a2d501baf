"""LagKV (arXiv 2504.04704): tokens are compared with the range of the following partition.

Formula and published settings: docs/methods/lagkv.md. The automatic lag follows the budget, because
with a fixed one the sinks and the uncompared tail hold up to sinks + 2 lag tokens, and smaller
budgets would measure recency only.
"""

from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from annotated_types import Ge
from torch import Tensor

from kvp.bounds import NotNegative
from kvp.scoring import Needs, View
from policies.base import AUTO, Auto, BaseScorer, Grid, Presets


@dataclass(frozen=True, kw_only=True)
class LagKV(BaseScorer):
    """Keep tokens that vary most against the following partition."""

    sinks: NotNegative = 4
    """First tokens, never compared and ranked first."""
    lag: Annotated[int, Ge(2)] | Auto = AUTO  # one token has no range
    """Tokens per partition, or `auto` to follow the budget."""

    base_name: ClassVar[str] = "lagkv"
    cost: ClassVar[str] = "one pass over keys and values, O(N D)"
    presets: ClassVar[Presets] = {
        "kvpress": {"sinks": 4, "lag": 128},
        "official": {"sinks": 16, "lag": 1024},
    }
    grid: ClassVar[Grid] = {"lag": (AUTO, 4, 8, 16, 32, 64, 128), "sinks": (0, 1, 4, 16)}

    @property
    def needs(self) -> Needs:
        """The budget, for a lag that follows it."""
        return Needs(budget=self.lag == AUTO)

    def score(self, view: View) -> Tensor:
        """Sinks in (2, 3], tail 1, compared tokens in [0, 1): [B, H, N] float32."""
        batch, heads, tokens, _ = view.keys.shape
        if isinstance(self.lag, int):
            lag = self.lag
        else:
            assert view.budget is not None
            lag = min(128, max(4, view.budget // 4))
        scores = torch.ones(batch, heads, tokens, device=view.keys.device)
        index = torch.arange(tokens, dtype=torch.float32, device=view.keys.device)
        if tokens < self.sinks + 2 * lag:
            scores[...] = index / tokens
        else:
            spread = self._lag_spread(view.keys, lag) + self._lag_spread(view.values, lag)
            ranks = (spread.argsort(dim=-1, stable=True).argsort(dim=-1) / lag).flatten(-2)
            scores[..., self.sinks : self.sinks + ranks.shape[-1]] = ranks
        sinks = index[: self.sinks]
        scores[..., : self.sinks] = 3 - sinks / max(self.sinks, 1)
        return scores

    def _lag_spread(self, states: Tensor, lag: int) -> Tensor:
        """[B, H, N, D] -> softmaxed spread [B, H, partitions - 1, lag] of compared partitions."""
        partitions = (states.shape[-2] - self.sinks) // lag
        body = states[..., self.sinks : self.sinks + partitions * lag, :].float()
        parts = torch.unflatten(body, -2, (partitions, lag))
        scored, reference = parts[..., :-1, :, :], parts[..., 1:, :, :]
        low, high = reference.amin(dim=-2, keepdim=True), reference.amax(dim=-2, keepdim=True)
        scaled: Tensor = (scored - low) / (high - low).clamp_min(1e-6)
        # torch's own `std` over a short last axis is ten times slower on CPUs.
        centred = scaled - scaled.mean(dim=-1, keepdim=True)
        spread: Tensor = torch.linalg.vector_norm(centred, dim=-1) / (scaled.shape[-1] - 1) ** 0.5
        return spread.softmax(dim=-1)
