"""Budget files: tokens per layer (or KV head), chosen once, sealed, for any later budget.

Normative description: docs/formats.md. What chose them is `kvp evolve` (a search or stored cost
curves); what applies them is `policies.allocators.evolved`. A file names the model it was made for
but is refused only for another number of layers or KV heads: fine-tuned models may use it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

from kvp.errors import PolicyError
from kvp.manifest import read_sealed_json, write_sealed_json
from kvp.ranking import Protection

FORMAT = "kvp-budgets"
FORMAT_VERSION = 1
BUDGET_FILE = "budgets.json"
"""Name of the file in a folder; the folder may be named in its stead."""

Level = Literal["layer", "head"]


@dataclass(frozen=True, kw_only=True)
class BudgetPoint:
    """One split of one budget."""

    budget: int
    """Requested tokens per KV head, on average over heads."""
    cached_tokens: int
    """Tokens in the cache that the counts were chosen for, before eviction."""
    counts: tuple[int, ...]
    """Tokens of every layer [L], or of every KV head [L * H], layer-major."""

    @property
    def share(self) -> float:
        """Mean count as a share of the cache."""
        return sum(self.counts) / len(self.counts) / self.cached_tokens


@dataclass(frozen=True, kw_only=True)
class BudgetFile:
    """Everything a budget file holds."""

    model: Mapping[str, str | None]
    """`id` and `revision` of the model; a record."""
    layers: int
    kv_heads: int
    scorer: str
    """Scorer that ranked the tokens: a method specification, or `kvp/LABEL`; a record."""
    protocol: str
    """`query_aware` or `query_agnostic`; a record."""
    protection: Protection
    """Tokens always kept while the counts were chosen; a record."""
    level: Level
    """One count per layer (the same for all its KV heads) or one per KV head."""
    points: tuple[BudgetPoint, ...]
    """At least one, ascending in `share`."""
    seed: int
    made_by: Mapping[str, Any] = field(default_factory=dict)
    """How the counts were chosen: `kind` search or curves, and its summary."""
    held_out: Mapping[str, Any] | None = None
    """The counts compared with uniform ones on other prompts, None where nothing was run."""
    data: Mapping[str, Any] = field(default_factory=dict)
    """Which prompts or curves the counts were chosen on."""

    def __post_init__(self) -> None:
        """Raise ValueError on points that do not fit the geometry or each other."""
        if self.level not in ("layer", "head"):
            raise ValueError(f"level {self.level!r} is neither layer nor head")
        if min(self.layers, self.kv_heads) < 1:
            raise ValueError("no layers or no KV heads")
        if not self.points:
            raise ValueError("it has no points")
        for point in self.points:
            if len(point.counts) != self.units or sum(point.counts) < 1:
                raise ValueError(f"a point does not have {self.units} counts")
            if min(point.counts) < 0 or max(point.counts) > point.cached_tokens:
                raise ValueError(f"a point keeps none to {point.cached_tokens} tokens")
        shares = [point.share for point in self.points]
        if any(second <= first for first, second in pairwise(shares)):
            raise ValueError("its points do not grow")

    @property
    def units(self) -> int:
        """Counts of a point: layers, or layers times KV heads."""
        return self.layers * (self.kv_heads if self.level == "head" else 1)


def budget_path(file: str | Path) -> Path:
    """The file itself, for a file or for the folder that holds one."""
    path = Path(file)
    return path / BUDGET_FILE if path.is_dir() else path


def save_budgets(path: Path, budgets: BudgetFile, run: Mapping[str, Any]) -> None:
    """Write a budget file atomically; `run` is the manifest of what made it."""
    content = {
        "format": FORMAT,
        "format_version": FORMAT_VERSION,
        "model": dict(budgets.model),
        "geometry": {"layers": budgets.layers, "kv_heads": budgets.kv_heads},
        "scorer": budgets.scorer,
        "protocol": budgets.protocol,
        "protection": {
            "sinks": budgets.protection.sinks,
            "recents": budgets.protection.recents,
        },
        "level": budgets.level,
        "points": [_point_record(point, budgets) for point in budgets.points],
        "seed": budgets.seed,
        "made_by": dict(budgets.made_by),
        "held_out": None if budgets.held_out is None else dict(budgets.held_out),
        "data": dict(budgets.data),
        "run": dict(run),
    }
    write_sealed_json(path, content)


def load_budgets(file: str | Path) -> BudgetFile:
    """Read a budget file, or the one in a folder; PolicyError names what is wrong with it."""
    path = budget_path(file)
    if not path.is_file():
        raise PolicyError(f"{path} is no budget file: name one that kvp evolve wrote")
    content = read_sealed_json(path, PolicyError)
    if content.get("format") != FORMAT:
        raise PolicyError(f"{path} is not a budget file")
    version = content.get("format_version")
    if version != FORMAT_VERSION:
        raise PolicyError(f"{path} has format version {version}, this kvp reads {FORMAT_VERSION}")
    try:
        geometry = content["geometry"]
        return BudgetFile(
            model=content["model"],
            layers=int(geometry["layers"]),
            kv_heads=int(geometry["kv_heads"]),
            scorer=content["scorer"],
            protocol=content["protocol"],
            protection=Protection(**content["protection"]),
            level=content["level"],
            points=tuple(_point(record, content["level"]) for record in content["points"]),
            seed=content["seed"],
            made_by=content["made_by"],
            held_out=content["held_out"],
            data=content["data"],
        )
    except (KeyError, TypeError, ValueError) as error:
        raise PolicyError(f"{path} is not a valid budget file: {error}") from error


def check_budget_geometry(
    budgets: BudgetFile, *, layers: int, kv_heads: int, label: str = "budgets"
) -> None:
    """Raise PolicyError, naming both, unless the counts are for this many layers and KV heads."""
    if (budgets.layers, budgets.kv_heads) != (layers, kv_heads):
        raise PolicyError(
            f"{label} holds budgets for {budgets.layers} layers x {budgets.kv_heads} KV heads, "
            f"the model has {layers} x {kv_heads}"
        )


def _point_record(point: BudgetPoint, budgets: BudgetFile) -> dict[str, Any]:
    counts: Sequence[Any] = point.counts
    if budgets.level == "head":
        width = budgets.kv_heads
        counts = [counts[start : start + width] for start in range(0, len(counts), width)]
    return {
        "budget": point.budget,
        "cached_tokens": point.cached_tokens,
        "counts": [list(count) if budgets.level == "head" else count for count in counts],
    }


def _point(record: Mapping[str, Any], level: str) -> BudgetPoint:
    counts = record["counts"]
    if level == "head":
        counts = [count for layer in counts for count in layer]
    if not all(type(count) is int for count in counts):
        raise ValueError("counts must be integers")
    return BudgetPoint(
        budget=int(record["budget"]),
        cached_tokens=int(record["cached_tokens"]),
        counts=tuple(counts),
    )
