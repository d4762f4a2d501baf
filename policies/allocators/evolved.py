"""EvolKV's budgets: tokens per layer, chosen once for later budgets (docs/methods/evolved.md)."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar, Literal, Self

import torch
from torch import Tensor

from kvp.allocation import Request
from kvp.artifacts.manifest import sha256_file
from kvp.errors import PolicyError, UsageError
from policies.allocators.per_layer import apportion_layers, repeat_in_heads
from policies.base import BaseAllocator
from policies.budget_files import BudgetFile, budget_path, load_budgets


@dataclass(frozen=True, kw_only=True)
class Evolved(BaseAllocator):
    """What a search chose (kvp evolve)."""

    base_name: ClassVar[str] = "evolved"
    cost: ClassVar[str] = "nothing per prompt; the search before it"
    reads: ClassVar[str] = "a budget file"

    file: str
    """Budget file, or the folder that `kvp evolve` wrote."""
    rounding: Literal["exact", "faithful"] = "exact"
    """`exact` meets the budget, `faithful` rounds up as published."""

    @classmethod
    def build(cls, argument: str | None, options: Mapping[str, str]) -> Self:
        """Make one from the file behind the colon, where others have a preset."""
        files = [one for one in (argument, options.get("file")) if one is not None]
        if len(files) != 1:
            number = "one" if files else "a"
            raise UsageError(f"{cls.base_name} needs {number} file: write {cls.base_name}:FILE")
        return super().build(None, {**options, "file": files[0]})

    def __post_init__(self) -> None:
        super().__post_init__()
        _ = self.budgets  # reading them checks them

    @cached_property
    def budgets(self) -> BudgetFile:
        """Content of the budget file."""
        return load_budgets(self.file)

    @cached_property
    def digest(self) -> str:
        """SHA-256 of the budget file."""
        return sha256_file(budget_path(self.file))

    @property
    def name(self) -> str:
        """`evolved:FILE`, with the rounding where it is not the default."""
        rounding = "" if self.rounding == "exact" else f"(rounding={self.rounding})"
        return f"{self.base_name}:{self.file}{rounding}"

    @property
    def meets_budget(self) -> bool:
        """Rounded up, they miss it."""
        return self.rounding == "exact"

    def check_geometry(self, *, layers: int, kv_heads: int) -> None:
        """Raise PolicyError, in one line, if the file was made for another geometry."""
        theirs = self.budgets
        if (theirs.layers, theirs.kv_heads) != (layers, kv_heads):
            raise PolicyError(
                f"{self.file} holds budgets for {theirs.layers} layers x {theirs.kv_heads} KV "
                f"heads, the model has {layers} x {kv_heads}"
            )

    def allocate(self, request: Request) -> Tensor:
        """Counts [L, H] int64; sum `request.total`, up to L - 1 more per KV head if faithful."""
        layers, heads, _ = request.scores.shape
        self.check_geometry(layers=layers, kv_heads=heads)
        chosen = torch.tensor(self.budgets.counts, dtype=torch.float64)
        if self.rounding == "exact":
            return apportion_layers(chosen, request)
        scaled = chosen * (request.budget * layers) / chosen.sum()  # the paper's completion
        counts = (scaled - 1e-9 * scaled.clamp_min(1)).ceil().long()
        return repeat_in_heads(counts.clamp(request.floor, request.scores.shape[-1]), request)
