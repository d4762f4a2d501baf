"""Budget files: tokens per layer, as `kvp evolve` writes them (docs/formats.md).

A file names its model, but is refused only for another number of layers or KV heads (fine-tuning).
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from kvp.artifacts.files import raising_as
from kvp.artifacts.manifest import Format, write_sealed_json
from kvp.errors import PolicyError
from kvp.hub import BUDGET_FILE
from kvp.protection import Protection

FORMAT = Format("kvp-budgets", 1)


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
        fields = {**content.pop("geometry"), **content, "protection": protection, "counts": counts}
        return BudgetFile(**fields)
