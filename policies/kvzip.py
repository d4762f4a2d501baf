"""KVzip (arXiv 2505.23416): what the model attends to while it repeats its context.

Formula and published settings: docs/methods/kvzip.md; the pass: `kvp.scoring.Reconstruction`.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from kvp.bounds import NotNegative, Positive
from kvp.scoring import Needs, Reconstruction, View
from policies.base import BaseScorer, Grid, Presets


@dataclass(frozen=True, kw_only=True)
class KVzip(BaseScorer):
    """Keep what repeating the context attends to."""

    chunk: Positive = 2048
    """Context tokens repeated per pass."""
    sinks: NotNegative = 4
    """First tokens that are in the softmax of every chunk."""
    plus: bool = False
    """KVzip+: weigh attention by what the value adds to the state."""
    full: bool = False
    """Softmax over the whole cache instead of sinks and chunk; the largest of all passes."""
    forced: NotNegative = 0

    base_name: ClassVar[str] = "kvzip"
    cost: ClassVar[str] = "one more forward pass over the context, in chunks"
    presets: ClassVar[Presets] = {"kvpress": {"forced": 4}, "paper": {"chunk": 2000}}
    grid: ClassVar[Grid] = {
        "plus": (False, True),
        "full": (False, True),
        "forced": (0, 1, 4, 16),
        "sinks": (0, 1, 4, 16),
        "chunk": (128, 256, 512, 2048),
    }

    @property
    def needs(self) -> Needs:
        """The attention of the repetition."""
        repetition = Reconstruction(
            chunk=self.chunk, sinks=self.sinks, weighted=self.plus, full=self.full
        )
        return Needs(reconstruction=repetition)

    def score(self, view: View) -> Tensor:
        """The signal itself, forced tokens at the largest float: [B, H, N] float32."""
        assert view.reconstruction is not None
        scores = view.reconstruction.clone(memory_format=torch.contiguous_format)
        scores[..., : self.forced] = torch.finfo(torch.float32).max  # KVzip+ may exceed 1
        return scores
