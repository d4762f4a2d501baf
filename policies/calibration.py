"""Calibration: per KV head a monotone map from ranker scores to a scale all heads share.

Scores of different heads are not comparable: a ranking does not change when all scores of a head
shift. The map gives the logarithm of the importance of tokens with that score on held-out traces
(`train.calibration.fit` fits it), so that one threshold can serve all heads of a model. It is
piecewise linear between knots and strictly increasing, so that it never changes a head's ranking
(but for scores that float32 cannot separate afterwards); beyond its knots it goes on with its end
slopes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True, eq=False)
class Calibration:
    """Maps of A heads, layer-major, with K >= 2 knots each."""

    target: str
    """What the map's values are logarithms of the expectation of (`train.calibration.fit`), or
    `distilled`: scales and offsets that `kvp distill` has learned."""
    scores: Tensor
    """[A, K] float32 scores at the knots, strictly increasing along K."""
    values: Tensor
    """[A, K] float32 values at the knots, strictly increasing along K."""

    def __post_init__(self) -> None:
        """Raise ValueError, naming the head, where a map is none or does not increase."""
        shape = self.scores.shape
        if len(shape) != 2 or shape[1] < 2 or self.values.shape != shape:
            raise ValueError(
                f"calibration knots are {tuple(shape)} and {tuple(self.values.shape)}, "
                "not twice [heads, 2 or more]"
            )
        for name, knots in (("scores", self.scores), ("values", self.values)):
            rising = (knots.diff(dim=-1) > 0).all(-1) & knots.isfinite().all(-1)
            if not bool(rising.all()):
                head = int((~rising).nonzero()[0])
                raise ValueError(f"calibration {name} of head {head} do not increase")

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
        return {
            "target": self.target,
            "scores": self.scores.tolist(),
            "values": self.values.tolist(),
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Calibration:
        """Inverse of `to_dict`; KeyError, TypeError or ValueError on foreign content."""
        return cls(
            target=data["target"],
            scores=torch.tensor(data["scores"], dtype=torch.float32),
            values=torch.tensor(data["values"], dtype=torch.float32),
        )
