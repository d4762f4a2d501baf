"""The smallest scorer and the smallest allocator that kvp takes from another package."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from kvp.allocation import Request, apportion
from kvp.scoring import View
from policies.base import BaseAllocator, Heuristic, Presets, check_integer


@dataclass(frozen=True, kw_only=True)
class Newest(Heuristic):
    """Newest tokens, in steps."""

    step: int = 1
    """Neighbouring tokens with the same score."""

    method: ClassVar[str] = "newest"
    presets: ClassVar[Presets] = {"coarse": {"step": 16}}
    cost: ClassVar[str] = "nothing to speak of"

    def __post_init__(self) -> None:
        """Raise UsageError on an empty step."""
        check_integer(self.method, "step", self.step, minimum=1)

    def score(self, view: View) -> Tensor:
        """Positions, divided: [B, H, N] float32."""
        steps = (view.positions // self.step).float()
        return steps[:, None].expand(view.keys.shape[:3]).contiguous()


@dataclass(frozen=True, kw_only=True)
class Tilt(BaseAllocator):
    """The first KV head of every layer gets twice as much as the others."""

    method: ClassVar[str] = "tilt"

    def allocate(self, request: Request) -> Tensor:
        """Exact total, in proportion 2 : 1 : ... : 1: [L, H] int64."""
        shares = torch.ones(request.scores.shape[:2], dtype=torch.float64)
        shares[:, 0] = 2
        tokens = request.scores.shape[-1]
        counts = apportion(shares.flatten(), request.total, minimum=request.floor, maximum=tokens)
        return counts.view_as(shares)
