"""KVP: rank cached tokens with the trained ranker of each KV head (paper, section 3).

Score = the ranker's output for (key after RoPE, value, true position), greedy: no Gumbel noise; in
a calibrated policy the logarithm of the importance of such tokens (`policies.calibration`).
The weights are the averaged (EMA) ones, which is what training exports. Cost per layer: H small
networks over N tokens, about 0.5 MFLOP per token and head at hidden 256. No query and no attention
is read, unless the policy was trained with the input `recent`: the last 32 queries then.
Differences to the released code: none in scoring; protection of sinks and recents is `kvp.ranking`.
Files are `policies.policy_files`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from kvp.errors import PolicyError
from kvp.geometry import Geometry
from kvp.scoring import Needs, View
from policies.calibration import Calibration
from policies.ranker import HeadRankers
from policies.recent_features import RECENT_QUERIES, recent_features

BLOCK = 8192
"""Tokens scored at once; bounds the memory of long contexts."""


@dataclass(frozen=True, kw_only=True, eq=False)
class LearnedScorer:
    """A trained policy as a scorer. The rankers follow the view's device; scores are float32."""

    rankers: HeadRankers
    """One ranker per KV head, layer-major: `geometry.total_kv_heads` of them."""
    geometry: Geometry
    """The model the policy was trained for."""
    calibration: Calibration | None = None
    """Map of every ranker's output to a scale that all heads share; None leaves it as it is."""
    label: str = "policy"
    """Name of the policy in messages: the directory it was loaded from."""
    metadata: Mapping[str, Any] = field(default_factory=dict)
    """Model, training manifest and held-out metrics, as in `policy.json`."""

    @property
    def name(self) -> str:
        """`kvp`; `label` says which policy it is."""
        return "kvp"

    @property
    def needs(self) -> Needs:
        """Keys, values and positions; the last queries where the rankers read them."""
        return Needs(queries=RECENT_QUERIES if self.rankers.spec.reads_queries else 0)

    @torch.no_grad()
    def score(self, view: View) -> Tensor:
        """Rank by the trained rankers: [B, H, N]; PolicyError if the view is another geometry's."""
        batch, heads, tokens, width = view.keys.shape
        if (heads, width) != (self.geometry.kv_heads, self.geometry.head_dim) or not (
            view.layer < self.geometry.layers
        ):
            raise PolicyError(
                f"policy {self.label} was trained for {self.geometry}, "
                f"the model's layer {view.layer} has {heads} KV heads of head_dim {width}"
            )
        rankers = self.rankers.to(view.keys.device)
        of_layer = slice(view.layer * heads, (view.layer + 1) * heads)
        keys = view.keys.transpose(0, 1).reshape(heads, batch * tokens, width)
        values = view.values.transpose(0, 1).reshape(heads, batch * tokens, width)
        positions = view.positions.reshape(-1)
        cached = view.positions[:, -1:] + 1 - view.fed_again  # the length rankers are trained with
        length = cached.expand(batch, tokens).reshape(-1)
        recent = self._recent(view)
        blocks = [slice(start, start + BLOCK) for start in range(0, batch * tokens, BLOCK)]
        parts = [
            rankers(
                keys[:, b], values[:, b], positions[b], length[b],
                None if recent is None else recent[:, b], heads=of_layer,
            )
            for b in blocks
        ]  # fmt: skip
        scores = torch.cat(parts, dim=-1)
        if self.calibration is not None:
            scores = self.calibration.apply(scores, of_layer)
        return scores.view(heads, batch, tokens).transpose(0, 1).contiguous()

    def _recent(self, view: View) -> Tensor | None:
        """Features of the last queries' attention, [H, B * N, features], where they are read."""
        if not self.rankers.spec.reads_queries:
            return None
        assert view.queries is not None
        features = recent_features(view.queries, view.keys)  # [B, H, N, features]
        return features.transpose(0, 1).flatten(1, 2)
