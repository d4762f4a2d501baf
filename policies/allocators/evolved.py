"""EvolKV's budgets applied: counts from a budget file, rescaled to any budget (paper, section 3).

Counts k_i become b_i = k_i T / A with A = sum of k, T = budget times layers, the paper's
completion. Costs nothing. Differences to the paper: it rounds every b_i up and so overshoots T by
up to L - 1 tokens (`rounding=faithful`); by default the sum is exact, by largest remainders.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

import torch
from torch import Tensor

from kvp.ranking import Request, apportion
from policies.allocators.per_layer import ROUNDINGS
from policies.budget_files import BudgetFile, check_budget_geometry, load_budgets
from policies.registry import BaseAllocator, Limits


@dataclass(frozen=True, kw_only=True)
class Evolved(BaseAllocator):
    """Counts of a budget file, equal for all KV heads of a layer."""

    method: ClassVar[str] = "evolved"
    line: ClassVar[str] = "what a search chose (kvp evolve)"
    cost: ClassVar[str] = "nothing per prompt; the search before it"
    reads: ClassVar[str] = "a budget file"
    limits: ClassVar[Limits] = {"rounding": ROUNDINGS}
    file_option: ClassVar[str] = "file"

    file: str
    """Budget file, or the folder that `kvp evolve` wrote."""
    rounding: str = "exact"
    """`exact` meets the budget, `faithful` rounds up as published."""

    def __post_init__(self) -> None:
        """Raise PolicyError unless the file can be read, and as all allocators."""
        super().__post_init__()
        assert self.budgets

    @cached_property
    def budgets(self) -> BudgetFile:
        """Content of the budget file."""
        return load_budgets(self.file)

    @property
    def name(self) -> str:
        """`evolved:FILE`, with the rounding where it is not the default."""
        rounding = "" if self.rounding == "exact" else f"(rounding={self.rounding})"
        return f"{self.method}:{self.file}{rounding}"

    @property
    def meets_budget(self) -> bool:
        """The published rounding misses it."""
        return self.rounding == "exact"

    def check(self, *, layers: int, kv_heads: int) -> None:
        """Raise PolicyError, in one line, if the file was made for another geometry."""
        check_budget_geometry(self.budgets, layers=layers, kv_heads=kv_heads, label=self.file)

    def allocate(self, request: Request) -> Tensor:
        """Counts [L, H] int64; sum `request.total`, up to L - 1 more per KV head if faithful."""
        layers, heads, tokens = request.scores.shape
        self.check(layers=layers, kv_heads=heads)
        chosen = torch.tensor(self.budgets.counts, dtype=torch.float64)
        total = request.budget * layers
        if self.rounding == "faithful":
            counts = completed(chosen, total).clamp(request.floor, tokens)
        else:
            counts = apportion(chosen, total, minimum=request.floor, maximum=tokens)
        return counts[:, None].expand(layers, heads).contiguous()


def completed(counts: Tensor, total: int) -> Tensor:
    """The paper's budget completion: counts scaled to `total` and rounded up, [L] int64.

    The sum is `total` to `total` + L - 1.
    """
    scaled = counts.double() * total / counts.sum()
    return (scaled - 1e-9 * scaled.clamp_min(1)).ceil().long()
