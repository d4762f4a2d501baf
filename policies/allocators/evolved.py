"""EvolKV's budgets: tokens per layer, chosen once, for any later budget (docs/methods/evolved.md).

`kvp evolve` writes the counts as a sealed budget file (docs/formats.md). A file names the model it
was made for but is refused only for another number of layers or KV heads: fine-tuned models may use
it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from kvp.artifacts.files import raising_as
from kvp.artifacts.manifest import Format, sha256_file, write_sealed_json
from kvp.errors import PolicyError, UsageError
from kvp.ranking import Protection, Request
from policies.allocators.per_layer import exact_counts, in_every_head
from policies.base import BaseAllocator, Limits, Value

FORMAT = Format("kvp-budgets", 1)
BUDGET_FILE = "budgets.json"
"""Name of the file in a folder; the folder may be named in its stead."""


@dataclass(frozen=True, kw_only=True)
class BudgetFile:
    """Everything a budget file holds (docs/formats.md); all but geometry and counts are records."""

    model: Mapping[str, str | None]
    layers: int
    kv_heads: int
    scorer: str
    protocol: str
    protection: Protection
    budget: int
    cached_tokens: int
    counts: tuple[int, ...]
    """Tokens of every KV head of a layer, [L]."""
    seed: int
    made_by: Mapping[str, Any] = field(default_factory=dict)
    held_out: Mapping[str, Any] | None = None
    data: Mapping[str, Any] = field(default_factory=dict)


def budget_path(file: str | Path) -> Path:
    """The file itself, for a file or for the folder that holds one."""
    path = Path(file)
    return path / BUDGET_FILE if path.is_dir() else path


def save_budgets(path: Path, budgets: BudgetFile, run: Mapping[str, Any]) -> None:
    """Write a budget file atomically; `run` is the manifest of what made it."""
    content = asdict(budgets)
    geometry = {name: content.pop(name) for name in ("layers", "kv_heads")}
    write_sealed_json(path, {**FORMAT.head, "run": dict(run), "geometry": geometry, **content})


def load_budgets(file: str | Path) -> BudgetFile:
    """Read a budget file, or the one in a folder; PolicyError names what is wrong with it."""
    path = budget_path(file)
    if not path.is_file():
        raise PolicyError(f"{path} is no budget file: name one that kvp evolve wrote")
    content = FORMAT.read(path, PolicyError)
    with raising_as(path, PolicyError):
        for name in (*FORMAT.head, "run"):
            del content[name]
        protection, counts = Protection(**content["protection"]), tuple(content["counts"])
        given = {**content.pop("geometry"), **content, "protection": protection, "counts": counts}
        return BudgetFile(**given)


@dataclass(frozen=True, kw_only=True)
class Evolved(BaseAllocator):
    """What a search chose (kvp evolve)."""

    method: ClassVar[str] = "evolved"
    cost: ClassVar[str] = "nothing per prompt; the search before it"
    reads: ClassVar[str] = "a budget file"
    limits: ClassVar[Limits] = {"rounding": ("exact", "faithful")}

    file: str
    """Budget file, or the folder that `kvp evolve` wrote."""
    rounding: str = "exact"
    """`exact` meets the budget, `faithful` rounds up as published."""

    @classmethod
    def build(cls, argument: str | None, options: Mapping[str, Value]) -> Self:
        """Make one from the file behind the colon, where others have a preset."""
        file = options.get("file", argument)
        if not file:
            raise UsageError(f"{cls.method} needs a file: write {cls.method}:FILE")
        return super().build(None, {**options, "file": str(file)})

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
        return f"{self.method}:{self.file}{rounding}"

    @property
    def meets_budget(self) -> bool:
        """Rounded up, they miss it."""
        return self.rounding == "exact"

    def check(self, *, layers: int, kv_heads: int) -> None:
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
        self.check(layers=layers, kv_heads=heads)
        chosen = torch.tensor(self.budgets.counts, dtype=torch.float64)
        if self.rounding == "exact":
            return exact_counts(chosen, request)
        scaled = chosen * (request.budget * layers) / chosen.sum()  # the paper's completion
        counts = (scaled - 1e-9 * scaled.clamp_min(1)).ceil().long()
        return in_every_head(counts.clamp(request.floor, request.scores.shape[-1]), request)
