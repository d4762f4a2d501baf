"""Hindsight oracle: rank by the attention future queries really paid.

Formula: score_i = w_i, the future importance of the KVP paper (section 3.1.1), for a future the
view supplies. For additive costs this ranking is optimal at every budget (proposition 1); it
bounds what any policy can reach and cannot be run on a real request. No options; no cost beyond w
itself.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from kvp.scoring import Needs, View
from policies.base import Heuristic


@dataclass(frozen=True, kw_only=True)
class Oracle(Heuristic):
    """Keep what the future will attend to."""

    method: ClassVar[str] = "oracle"
    line: ClassVar[str] = "what the future will attend to (hindsight, an upper bound)"
    cost: ClassVar[str] = "the future itself"

    @property
    def needs(self) -> Needs:
        """The future attention of every token."""
        return Needs(future=True)

    def score(self, view: View) -> Tensor:
        """Future attention: [B, H, N] float32."""
        assert view.future is not None
        return view.future.float()
