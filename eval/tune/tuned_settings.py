"""settings.json: the setting that was chosen for each method and protocol, and from how many.

Written by kvp tune; kvp eval runs it (`--methods tuned:FILE`) and keeps the entries in the manifest
of its results, from which kvp report takes them. `docs/formats.md` describes the file.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import Field, TypeAdapter

from eval.results.records import MANIFEST, altered_part
from eval.results.settings import MethodSetting
from kvp.artifacts.files import foreign
from kvp.artifacts.manifest import Format, read_sealed_json, write_sealed_json
from kvp.errors import ResultsError

FORMAT = Format("kvp-settings", 1)
SETTINGS = "settings.json"


@dataclass(frozen=True, kw_only=True)
class Scored:
    """A setting and its score on the prompts of the tuning."""

    setting: MethodSetting
    """Its policy is the group, empty for other methods than `kvp`."""
    scorer: str
    """Specification of the scorer; `kvp` for policies."""
    score: float
    """Mean over budgets of the mean over tasks: 0 to 1, or minus nats per token of replies."""
    interval: tuple[float, float]
    """95 %, over prompts."""

    @property
    def label(self) -> str:
        """The setting in one word, `+p` where first and last tokens are always kept."""
        return replace(self.setting, method=self.scorer, variant="auto", policy=None).label


@dataclass(frozen=True, kw_only=True)
class Tuned:
    """What the tuning of one method under one protocol found."""

    requested: str
    """The method as `--methods` named it."""
    protocol: str
    chosen: Scored
    published: tuple[Scored, ...]
    """The default and the published presets, with and without protection."""
    tried: int
    """Settings that were tried."""

    def chose(self, setting: MethodSetting) -> bool:
        """Whether it chose a setting of a report; groups have no name where there is only one."""
        ours, group = self.chosen.setting, setting.policy or self.chosen.setting.policy
        return replace(setting, policy=group) == replace(ours, policy=ours.policy or group)


_OF_SETTING = ("variant", "allocator", "protected")
"""What the file has of a setting beside each score."""


def _to_file(entry: Tuned) -> dict[str, Any]:
    def flat(one: Scored) -> dict[str, Any]:
        setting = {name: getattr(one.setting, name) for name in _OF_SETTING}
        return {"scorer": one.scorer, **setting, "score": one.score, "interval": one.interval}

    return {
        "method": entry.chosen.setting.method, "group": entry.chosen.setting.policy,
        "requested": entry.requested, "protocol": entry.protocol, "chosen": flat(entry.chosen),
        "published": [*map(flat, entry.published)], "tried": entry.tried,
    }  # fmt: skip


def _from_file(entry: Mapping[str, Any]) -> dict[str, Any]:
    def nest(one: Mapping[str, Any]) -> dict[str, Any]:
        setting = {"method": entry["method"], "policy": entry["group"]}
        return {**one, "setting": setting | {name: one[name] for name in _OF_SETTING}}

    published = [*map(nest, entry["published"])]
    return {**entry, "chosen": nest(entry["chosen"]), "published": published}


@dataclass(frozen=True, kw_only=True)
class TunedSettings:
    """The content of a settings file."""

    split: str
    """Split of the prompts."""
    data: Mapping[str, Any] = field(hash=False)
    """Model, tasks, length, budgets, prompts and protection of the tuning."""
    methods: Annotated[tuple[Tuned, ...], Field(min_length=1)]
    path: str = field(default="", compare=False)
    """File or folder as it was named."""

    def to_json(self) -> dict[str, Any]:
        """JSON values, as in the file and in the manifest of results."""
        methods = [*map(_to_file, self.methods)]
        return {"split": self.split, "data": dict(self.data), "methods": methods}

    @classmethod
    def from_json(cls, content: Mapping[str, Any], label: str, path: str = "") -> Self:
        """Read `to_json`; raises ResultsError, naming `label`, where it is damaged."""
        with foreign(label, ResultsError):
            methods = [*map(_from_file, content["methods"])]
            return TypeAdapter(cls).validate_python({**content, "methods": methods, "path": path})


def save_settings(path: Path, settings: TunedSettings, run: Mapping[str, Any]) -> None:
    """Write a settings file; `run` says what produced it."""
    write_sealed_json(path, {**FORMAT.head, **settings.to_json(), "run": dict(run)})


def load_settings(name: str | Path) -> TunedSettings:
    """Read a settings file, or that of a folder; raises ResultsError where it is none."""
    path = Path(name)
    if not path.exists():
        raise ResultsError(f"tuned:{path}: there is no such file or folder; kvp tune writes one")
    if (path / MANIFEST).exists():  # its folder; a file alone stands for itself
        manifest = read_sealed_json(path / MANIFEST, ResultsError)
        if lacking := altered_part(path, manifest):
            raise ResultsError(f"tuned:{path}: {lacking}; repeat its kvp tune command")
    path = path / SETTINGS if path.is_dir() else path
    return TunedSettings.from_json(FORMAT.read(path, ResultsError), str(path), str(name))
