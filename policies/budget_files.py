"""Budget files: tokens per layer, chosen once, sealed, for any later budget.

Normative description: docs/formats.md. What chose them is `kvp evolve`; what applies them is
`policies.allocators.evolved`. A file names the model it was made for but is refused only for
another number of layers or KV heads: fine-tuned models may use it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvp.errors import PolicyError
from kvp.manifest import read_sealed_json, write_sealed_json
from kvp.ranking import Protection

FORMAT = "kvp-budgets"
FORMAT_VERSION = 1
BUDGET_FILE = "budgets.json"
"""Name of the file in a folder; the folder may be named in its stead."""


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
    budget: int
    """Tokens per KV head on average that the counts were chosen for."""
    cached_tokens: int
    """Tokens in the cache before eviction that the counts were chosen for."""
    counts: tuple[int, ...]
    """Tokens of every KV head of a layer, [L]."""
    seed: int
    made_by: Mapping[str, Any] = field(default_factory=dict)
    """How the counts were chosen: settings and summary of the search."""
    held_out: Mapping[str, Any] | None = None
    """The counts compared with uniform ones on other prompts, None where nothing was run."""
    data: Mapping[str, Any] = field(default_factory=dict)
    """Which prompts the counts were chosen on."""

    def __post_init__(self) -> None:
        """Raise ValueError on counts that do not fit the geometry."""
        if min(self.layers, self.kv_heads) < 1 or len(self.counts) != self.layers:
            raise ValueError(f"{len(self.counts)} counts for {self.layers} layers")
        if not all(type(count) is int for count in self.counts) or sum(self.counts) < 1:
            raise ValueError("counts must be integers, one of them positive")
        if min(self.counts) < 0 or max(self.counts) > self.cached_tokens:
            raise ValueError(f"a count is not within 0 and {self.cached_tokens}")


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
        "budget": budgets.budget,
        "cached_tokens": budgets.cached_tokens,
        "counts": list(budgets.counts),
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
            budget=content["budget"],
            cached_tokens=content["cached_tokens"],
            counts=tuple(content["counts"]),
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
