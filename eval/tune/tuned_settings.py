"""settings.json: the setting that was chosen for each method and protocol, and from how many.

Written by kvp tune; kvp eval runs it (`--methods tuned:FILE`) and keeps the entries in the manifest
of its results, from which kvp report takes them. `docs/formats.md` describes the file.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

from pydantic import TypeAdapter

from eval.results.records import MANIFEST, altered_part, method_label
from kvp.artifacts.files import foreign
from kvp.artifacts.manifest import Format, read_sealed_json, write_sealed_json
from kvp.errors import ResultsError

FORMAT = Format("kvp-settings", 1)
SETTINGS = "settings.json"


@dataclass(frozen=True, kw_only=True)
class Scored:
    """A setting and its score on the prompts of the tuning."""

    scorer: str
    """Specification of the scorer; `kvp` for policies."""
    variant: str
    """As in records."""
    allocator: str
    protected: bool
    score: float
    """Mean over budgets of the mean over tasks: 0 to 1, or minus nats per token of replies."""
    interval: tuple[float, float]
    """95 %, over prompts."""

    @property
    def label(self) -> str:
        """The setting in one word, `+p` where first and last tokens are always kept."""
        return f"{method_label(self.scorer, 'auto', self.allocator)}{' +p' * self.protected}"


@dataclass(frozen=True, kw_only=True)
class Tuned:
    """What the tuning of one method under one protocol found."""

    method: str
    """Name in records."""
    group: str
    """Policies that differ only in seed, as in reports; empty for other methods."""
    requested: str
    """The method as `--methods` named it."""
    protocol: str
    chosen: Scored
    published: tuple[Scored, ...]
    """The default and the published presets, with and without protection."""
    tried: int
    """Settings that were tried."""


@dataclass(frozen=True, kw_only=True)
class TunedSettings:
    """The content of a settings file."""

    split: str
    """Split of the prompts."""
    data: Mapping[str, Any]
    """Model, tasks, length, budgets, prompts and protection of the tuning."""
    methods: tuple[Tuned, ...]

    def to_json(self) -> dict[str, Any]:
        """JSON values, as in the file and in the manifest of results."""
        return asdict(self)

    @classmethod
    def from_json(cls, content: Mapping[str, Any], label: str) -> Self:
        """Read `to_json`; raises ResultsError, naming `label`, where it is damaged."""
        with foreign(label, ResultsError):
            return TypeAdapter(cls).validate_python(content)


def save_settings(path: Path, settings: TunedSettings, run: Mapping[str, Any]) -> None:
    """Write a settings file; `run` says what produced it."""
    write_sealed_json(path, {**FORMAT.head, **settings.to_json(), "run": dict(run)})


def load_settings(path: Path) -> TunedSettings:
    """Read a settings file, or that of a folder; raises ResultsError where it is none."""
    if not path.exists():
        raise ResultsError(f"tuned:{path}: there is no such file or folder; kvp tune writes one")
    if (path / MANIFEST).exists():  # its folder; a file alone stands for itself
        manifest = read_sealed_json(path / MANIFEST, ResultsError)
        if lacking := altered_part(path, manifest):
            raise ResultsError(f"tuned:{path}: {lacking}; repeat its kvp tune command")
    path = path / SETTINGS if path.is_dir() else path
    return TunedSettings.from_json(FORMAT.read(path, ResultsError), str(path))
