"""WindowKV's budgets (arXiv 2503.17922) by groups of layers (docs/methods/windowkv_rule.md)."""

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import torch
from annotated_types import Ge
from torch import Tensor

from kvp.allocation import Request
from kvp.bounds import Positive
from kvp.scoring import AUTO_GROUP, layers_per_group
from policies.allocators.per_layer import apportion_layers, linear_budgets
from policies.base import AUTO, Auto, BaseAllocator, Grid


@dataclass(frozen=True, kw_only=True)
class WindowKVAllocator(BaseAllocator):
    """Groups of layers on a falling line, the lowest has most."""

    rule: Literal["code", "paper"] = "code"
    """`code` (the group size matters) or `paper` (it does not)."""
    divisor: Annotated[float, Ge(1)] = 14.0
    """Lambda: what the budget is divided by to get the smallest."""
    group: Positive | Auto = AUTO
    """Gamma: layers per group, or `auto`."""

    base_name: ClassVar[str] = "windowkv"
    grid: ClassVar[Grid] = {"divisor": (1.0, 3.0, 7.0, 14.0, 28.0)}

    def allocate(self, request: Request) -> Tensor:
        """Falling counts: [L, H] int64, sum `request.total`."""
        layers, budget = request.scores.shape[0], request.budget
        gamma = self.group if isinstance(self.group, int) else layers_per_group(layers, AUTO_GROUP)
        groups = -(-layers // gamma)
        group_of_layer = torch.arange(layers) // gamma
        top = float(budget)
        if groups > 1:
            top = min(budget * (gamma if self.rule == "code" else 1) / self.divisor, top)
        shares = linear_budgets(2 * budget - top, top, groups)[group_of_layer]
        return apportion_layers(shares, request)
