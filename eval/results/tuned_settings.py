"""settings.json: the setting that was chosen for each method and protocol, and from how many.

Written by kvp tune; kvp eval runs it (`--methods tuned:FILE`) and keeps the entries in the manifest
of its results, from which kvp report takes them. `docs/formats.md` describes the file.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import Field, TypeAdapter

from eval.results.method_setting import MethodSetting
from eval.results.record_names import MANIFEST, SETTINGS
from eval.results.sealing import describe_changes
from kvp.artifacts.files import raising_as
from kvp.artifacts.manifest import Format, read_sealed_json
from kvp.errors import ResultsError

FORMAT = Format("kvp-settings", 1)


@dataclass(frozen=True, kw_only=True)
class ScoredSetting:
    """A setting, as settings.json names it, and its score on the prompts of the tuning."""

    scorer: str
    """Specification of the scorer; `kvp` for policies."""
    variant: str
    """As in `MethodSetting`, as is `protected`; `allocator_name` is its `allocator`."""
    allocator: str
    """Specification of the allocator."""
    protected: bool
    score: float
    """Mean over budgets of that over tasks of that over prompts: of the answers' scores, 0 to 1, or
    of minus the nats per token of given replies."""
    interval: tuple[float, float]
    allocator_name: str | None = None
    """None in files of earlier versions, which knew none but kvp's own: `allocator`."""

    @property
    def label(self) -> str:
        """The setting in one word, `+p` where first and last tokens are always kept."""
        method, allocator = self.scorer, self.allocator
        return MethodSetting(
            method=method, allocator_name=allocator, protected=self.protected
        ).label


@dataclass(frozen=True, kw_only=True)
class TunedMethod:
    """The result of tuning one method under one protocol, as it is in the file."""

    method: str
    requested: str
    protocol: str
    chosen: ScoredSetting
    published: tuple[ScoredSetting, ...]
    """The default and the published presets, with and without protection."""
    tried: int

    def chose(self, setting: MethodSetting) -> bool:
        """Whether `setting`, that of a report, is the chosen one."""
        chosen, allocator = self.chosen, self.chosen.allocator_name or self.chosen.allocator
        ours = self.method, chosen.variant, allocator, chosen.protected
        return ours == (setting.method, setting.variant, setting.allocator_name, setting.protected)


@dataclass(frozen=True, kw_only=True)
class TunedSettings:
    """The content of a settings file."""

    split: str
    data: Mapping[str, Any] = field(hash=False)
    """Tasks, budgets and prompts of the tuning, and the settings that its test should share."""
    methods: Annotated[tuple[TunedMethod, ...], Field(min_length=1)]
    path: str = field(default="", compare=False)

    def to_json(self) -> dict[str, Any]:
        """Values for JSON, as in the file and in the manifest of results."""
        return {name: value for name, value in asdict(self).items() if name != "path"}

    @classmethod
    def from_json(cls, content: Mapping[str, Any], label: str, path: str = "") -> Self:
        """Read `to_json`; ResultsError, naming `label`, where it is damaged, or was written when
        several policies were tuned at once.
        """
        with raising_as(label, ResultsError):
            found = TypeAdapter(cls).validate_python({**content, "path": path})
        if len({(entry.requested, entry.protocol) for entry in found.methods}) < len(found.methods):
            raise ResultsError(f"{label} is of several policies: tune each of them apart")
        return found


def load_settings(name: str | Path) -> TunedSettings:
    """Read a settings file, or the one in a folder; ResultsError where it is none."""
    path = Path(name)
    if not path.exists():
        raise ResultsError(f"tuned:{path}: there is no such file or folder; kvp tune writes one")
    if (path / MANIFEST).exists():  # a folder of kvp tune; a single file has no manifest to check
        manifest = read_sealed_json(path / MANIFEST, ResultsError)
        if manifest.get("planned") != [] and not (path / SETTINGS).exists():
            kind = f"its format is {manifest.get('format')!r:.50}"
            raise ResultsError(f"tuned:{path} has no {SETTINGS} of kvp tune: {kind}")
        if lacking := describe_changes(path, manifest):
            raise ResultsError(f"tuned:{path}: {lacking}; repeat its kvp tune command")
    path = path / SETTINGS if path.is_dir() else path
    return TunedSettings.from_json(FORMAT.read(path, ResultsError), str(path), str(name))
