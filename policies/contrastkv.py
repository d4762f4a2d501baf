"""ContrastKV (ACL 2026 long.417): what repeating the context attends to, and what noise does.

Formula and open points: docs/methods/contrastkv.md. The returned scores realise its order of (fused
score, S+, position), also between heads and layers (`ordered_scores`).
"""

import math
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import torch
from annotated_types import Ge, Le, Lt
from torch import Tensor

from kvp.bounds import Positive, Weight
from kvp.scoring import Needs, Noise, Reconstruction, View
from policies.base import BaseScorer, Grid, Presets

_MINIMUM_TOKENS = 20
_CONTEXT_SHARE = 0.1  # appendix A.1
_ONE = 0x3F800000  # the bits of 1.0 in float32


@dataclass(frozen=True, kw_only=True)
class ContrastKV(BaseScorer):
    """Keep what repeating the context attends to, corrected by noise."""

    beta: Annotated[float, Ge(0), Le(0.5)] = 0.1
    """Share of a head's tokens above (and below) the quantiles, 0 to 0.5; 0 skips the step."""
    gamma: Weight = 0.12
    """Weight of the noise signal for undecided tokens."""
    chunk: Positive = 2048
    """Context tokens repeated per pass."""
    denominator: Literal["chunk", "full"] = "chunk"
    """Softmax of S+: `chunk` (sinks, chunk, the pass itself) or `full` (the whole cache)."""
    scope: Literal["layer", "head"] = "layer"
    """Whose extremes step 2 takes: `layer` or `head`."""
    noise: Positive = 64
    seed: Annotated[int, Ge(-(2**63)), Lt(2**63)] = 0
    contrast: Literal["random", "context"] = "random"
    """What gives S-: `random` tokens, or the first tenth of the `context` (the paper's control)."""

    base_name: ClassVar[str] = "contrastkv"
    cost: ClassVar[str] = (
        "one more forward pass over the context, in chunks, and one of random tokens"
    )
    presets: ClassVar[Presets] = {"paper": {"denominator": "full"}}
    grid: ClassVar[Grid] = {
        "beta": (0.0, 0.02, 0.05, 0.1, 0.2, 0.5),
        "gamma": (0.0, 0.06, 0.12, 0.25, 0.5),
        "denominator": ("chunk", "full"),
        "scope": ("layer", "head"),
        "noise": (16, 32, 64, 128),
    }

    @property
    def needs(self) -> Needs:
        """The attention of the repetition and of the noise."""
        repetition = Reconstruction(chunk=self.chunk, full=self.denominator == "full")
        beginning = _CONTEXT_SHARE if self.contrast == "context" else 0.0
        noise = Noise(tokens=self.noise, seed=self.seed, beginning=beginning)
        return Needs(reconstruction=repetition, noise=noise)

    def score(self, view: View) -> Tensor:
        """Fused scores in their full order: [B, H, N] float32."""
        assert view.reconstruction is not None
        assert view.noise is not None
        positive, negative = view.reconstruction, view.noise
        gated = self.beta > 0 and positive.shape[-1] >= _MINIMUM_TOKENS
        if not gated and self.gamma == 0:
            return positive.clone(memory_format=torch.contiguous_format)
        axes = (-2, -1) if self.scope == "layer" else (-1,)
        low, high = negative.amin(axes, keepdim=True), negative.amax(axes, keepdim=True)
        spread = torch.where(high > low, high - low, 1.0)
        raised = positive + self.gamma * ((negative - low) / spread)  # [B, H, N]
        fused = torch.minimum(raised, positive.amax(axes, keepdim=True))
        if gated:
            most = [s >= quantile(s, 1 - self.beta) for s in (positive, negative)]
            least = [s <= quantile(s, self.beta) for s in (positive, negative)]
            fused = fused.masked_fill(least[0] & least[1], 0.0)
            fused = fused.masked_fill(most[0] & most[1], 1.0)
        return ordered_scores(fused, positive)


def quantile(scores: Tensor, share: float) -> Tensor:
    """The `share`-quantile over the last axis, linear interpolation: [..., N] -> [..., 1] float64.

    For any N (`torch.quantile` stops at 16 million elements).
    """
    ordered = scores.double().sort(dim=-1).values
    rank = (scores.shape[-1] - 1) * share
    if abs(rank - round(rank)) < 1e-9:  # 0.9 * 30 is 27 and hits the token there exactly
        rank = round(rank)
    below = math.floor(rank)
    above = min(below + 1, scores.shape[-1] - 1)
    low, high = ordered[..., below, None], ordered[..., above, None]  # [..., 1]
    return low + (rank - below) * (high - low)


def ordered_scores(fused: Tensor, positive: Tensor) -> Tensor:
    """One float32 per token in the order of (fused, positive): [B, H, N] each, values in [0, 1].

    Equal only where both are equal, so that ties are left to position. Neighbouring floats of one
    sign have neighbouring bit patterns, which is all this uses:

    - fused 1 becomes the float whose bits are those of 1.0 plus those of `positive`: above 1;
    - fused 0 becomes minus the float whose bits are those of 1.0 minus those of `positive`: at
      most 0;
    - anything between stays as it is, or is raised by the few units in the last place it takes to
      separate it from tokens of the layer with the same fused score and a smaller `positive`.

    The first two are the same function in every layer, so tokens compare exactly across layers;
    the third shifts them by no more than one unit (6e-8 of the score) per tied token.
    """
    bits = _to_bits(positive.clamp(0, 1))  # [B, H, N]
    between = _break_ties(_to_bits(fused.clamp(0, 1)).flatten(1), bits.flatten(1)).view(bits.shape)
    above, below = _from_bits(_ONE + bits), -_from_bits(_ONE - bits)
    return torch.where(fused >= 1, above, torch.where(fused <= 0, below, _from_bits(between)))


def _break_ties(fused: Tensor, positive: Tensor) -> Tensor:
    """Bits [B, M] of the fused scores strictly between 0 and 1, ties resolved by `positive`."""
    by_positive = positive.argsort(dim=-1, stable=True)
    order = by_positive.gather(1, fused.gather(1, by_positive).argsort(dim=-1, stable=True))
    fused, positive = fused.gather(1, order), positive.gather(1, order)  # ascending pairs
    new = (fused.diff(dim=-1) != 0) | (positive.diff(dim=-1) != 0)  # [B, M - 1]
    new &= (fused[:, 1:] > 0) & (fused[:, 1:] < _ONE)
    step = torch.nn.functional.pad(new.long().cumsum(dim=-1), (1, 0))
    # The smallest values >= fused that rise by 1 at every new pair.
    raised = step + (fused - step).cummax(dim=-1).values
    return torch.empty_like(raised).scatter_(1, order, raised.clamp(max=_ONE - 1))


def _to_bits(values: Tensor) -> Tensor:
    return values.contiguous().view(torch.int32).long()


def _from_bits(bits: Tensor) -> Tensor:
    return bits.int().view(torch.float32)
