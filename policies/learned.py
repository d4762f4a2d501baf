"""KVP: rank cached tokens with the trained ranker of each KV head (paper, section 3).

Score = the ranker's output for (key after RoPE, value, true position), greedy: no Gumbel noise; in
a calibrated policy the logarithm of the importance of such tokens (`Calibration`). The weights are
the averaged (EMA) ones. Cost: docs/results/speed.md. No query and no attention is read, unless the
policy was trained with the input `recent`: the last 32 queries then.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from kvp.errors import PolicyError, warn_caller
from kvp.geometry import Geometry
from kvp.names import CALIBRATED, LEARNED
from kvp.scoring import Needs, View
from policies.ranker import RECENT_QUERIES, HeadRankers, recent_features
from policies.sources import PolicySource

BLOCK = 8192
"""Tokens scored at once; bounds the memory of long contexts."""
CPU_BLOCK = 1024
"""The same on a CPU, where the activations of a block should fit in a core's cache."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Calibration:
    """Per KV head a monotone map from ranker scores to a scale that all heads share.

    It gives the logarithm of the importance of tokens with a score on held-out traces
    (`train.learning.calibration` fits it). It is piecewise linear between the K >= 2 knots of each
    of A heads, goes on beyond them with its end slopes, and never changes a head's ranking (but for
    scores that float32 cannot separate).
    """

    target: str
    """What the map's values are logarithms of the expectation of (`train.learning.calibration`)."""
    scores: Tensor
    """[A, K] float32 scores at the knots, strictly increasing along K."""
    values: Tensor
    """[A, K] float32 values at the knots, strictly increasing along K."""

    def __post_init__(self) -> None:
        shape = self.scores.shape
        if len(shape) != 2 or shape[1] < 2 or self.values.shape != shape:
            raise ValueError(
                f"calibration knots are {tuple(shape)} and {tuple(self.values.shape)}, "
                "not twice [heads, 2 or more]"
            )
        knots = torch.stack([self.scores, self.values])
        if not bool((knots.diff(dim=-1) > 0).all() and knots.isfinite().all()):
            raise ValueError("calibration knots do not increase")

    def apply(self, scores: Tensor, heads: slice = slice(None)) -> Tensor:
        """Calibrated scores: [a, N] float32 of the a heads in `heads` -> [a, N] float32."""
        knots = self.scores[heads].to(scores.device)
        values = self.values[heads].to(scores.device)
        right = torch.searchsorted(knots, scores.contiguous()).clamp(1, knots.shape[1] - 1)
        low, high = knots.gather(1, right - 1), knots.gather(1, right)
        base, top = values.gather(1, right - 1), values.gather(1, right)
        slope = (top - base).double() / (high - low).double()
        largest = torch.finfo(torch.float32).max
        mapped = (base + (scores - low) * slope).clamp(-largest, largest).float()
        # Rounding may carry a score across its knot's value, where the next piece begins.
        mapped = torch.where(scores <= high, mapped.minimum(top), mapped)
        return torch.where(scores >= low, mapped.maximum(base), mapped)

    def to_dict(self) -> dict[str, Any]:
        """Plain dictionary for JSON; float32 values survive it bit for bit."""
        knots = {"scores": self.scores.tolist(), "values": self.values.tolist()}
        return {"target": self.target, **knots}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Calibration:
        """Inverse of `to_dict`; KeyError, TypeError or ValueError on foreign content."""
        scores, values = (torch.tensor(data[n], dtype=torch.float32) for n in ("scores", "values"))
        return cls(target=data["target"], scores=scores, values=values)


@dataclass(frozen=True, kw_only=True, eq=False)
class LearnedScorer:
    """A trained policy as a scorer. The first GPU gets all rankers; scores are float32."""

    rankers: HeadRankers
    """One ranker per KV head, layer-major: `geometry.total_kv_heads` of them."""
    geometry: Geometry
    calibration: Calibration | None = None
    label: str = "policy"
    """Name of the policy in messages: the one that it was loaded by."""
    metadata: Mapping[str, Any] = field(default_factory=dict)
    """Model, training manifest and held-out metrics, as in `policy.json`."""
    source: PolicySource | None = None
    """Where it was loaded from; None for one that was made in memory."""
    digest: str | None = None
    """SHA-256 of the index of that folder, likewise."""

    name = LEARNED
    """`label` says which policy it is."""

    @property
    def model_name(self) -> str | None:
        """The model that it was trained for, as people load it; None where no record says so."""
        model: Mapping[str, str | None] = self.metadata.get("model", {})
        return model.get("base_model") or model.get("id")

    @property
    def recommended_allocator(self) -> str | None:
        """The allocator of a calibrated policy; None for others, whose heads cannot compete."""
        return CALIBRATED if self.calibration else None

    def __repr__(self) -> str:
        source = self.source
        count = sum(weight.numel() for weight in self.rankers.parameters())
        calibrated = "not calibrated: heads cannot compete for one budget (ada, global)"
        if self.calibration:
            calibrated = f"calibrated ({self.calibration.target}): heads can compete (ada, global)"
        return (
            f"policy {self.label!r} for {self.model_name}: "
            f"{self.geometry}\n{self.geometry.total_kv_heads} rankers, {count:,} parameters, which "
            f"read {', '.join(self.rankers.spec.inputs)}\n"
            f"{calibrated}\n"
            f"from {(source.repository or source.folder) if source else 'memory'}"
        )

    @property
    def needs(self) -> Needs:
        """Keys, values and positions; the last queries where the rankers read them."""
        return Needs(queries=RECENT_QUERIES if self.rankers.spec.reads_queries else 0)

    @torch.no_grad()
    def score(self, view: View) -> Tensor:
        """Rank by the trained rankers: [B, H, N]; PolicyError if the view is another geometry's.

        Tokens that are fed again get 0: nobody ranks them, and they are no neighbours in training.
        """
        batch, heads, seen, _ = view.keys.shape
        tokens, rankers_of_view = seen - view.fed_again, self._rankers_of(view)
        if view.keys.is_cuda and not self.rankers.score_weight.is_cuda:
            self.rankers.to(view.keys.device)  # once: to layers elsewhere only their heads travel
        positions = view.head_positions
        length = positions[..., -1:] + 1 - view.fed_again  # that rankers are trained with
        inputs = [view.keys, view.values, positions, length.expand_as(positions)]
        if self.rankers.spec.reads_queries:
            assert view.queries is not None
            inputs.append(recent_features(view.queries, view.keys))
        # [B, H, N, ...] -> [H, B * tokens, ...]
        flat = [each[:, :, :tokens].transpose(0, 1).flatten(1, 2) for each in inputs]
        gaps = view.positions.ndim == 3  # the heads hold different tokens, with gaps
        parts = [
            self.rankers(*(x[:, outer] for x in flat), heads=rankers_of_view, gaps=gaps)[:, inner]
            for outer, inner in self._blocks(batch, tokens, view.keys.device.type)
        ]
        scores = torch.cat(parts, dim=-1)  # [H, B * tokens]
        if self.calibration is not None:
            scores = self.calibration.apply(scores, rankers_of_view)
        scores = scores.view(heads, batch, tokens).transpose(0, 1)
        return F.pad(scores, (0, view.fed_again)).contiguous()

    def _rankers_of(self, view: View) -> slice:
        """Which rankers score a view; PolicyError for another geometry's, warns of a long one."""
        _, heads, seen, width = view.keys.shape
        tokens, spec, layers = seen - view.fed_again, self.rankers.spec, self.geometry.model_layers
        layer_heads = range(self.geometry.kv_heads)[view.heads]
        expected = len(layer_heads), self.geometry.head_dim
        if (heads, width) != expected or view.layer not in layers:
            raise PolicyError(
                f"policy {self.label} was trained for {self.geometry}, "
                f"the model's layer {view.layer} has {heads} KV heads of head_dim {width}"
            )
        if view.layer == layers[0] and not spec.reach and tokens > 2 * spec.reference_length:
            warn_caller(
                f"policy {self.label} learned from contexts of at most {spec.reference_length} "
                f"tokens and ranks {tokens}: expect it to fail, or train it with --reach"
            )
        first = layers.index(view.layer) * self.geometry.kv_heads + layer_heads.start
        return slice(first, first + heads)

    def _blocks(self, batch: int, tokens: int, device: str) -> Iterator[tuple[slice, slice]]:
        """Tokens of B prompts scored at once, with neighbours of their prompt, and which count."""
        reach = self.rankers.spec.neighbours
        block = CPU_BLOCK if device == "cpu" else BLOCK
        together = tokens if reach else batch * tokens
        for first in range(0, batch * tokens, together):
            for start in range(first, first + together, block):
                stop = min(start + block, first + together)
                outer = slice(max(start - reach, first), min(stop + reach, first + together))
                yield outer, slice(start - outer.start, stop - outer.start)
