"""Settings of a study of training: one YAML file says which arms are trained on which prompts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, TypeVar

import yaml

SPLITS = ("validation", "test")
"""What policies are judged on."""
PROTECTIONS = {"on": (True,), "off": (False,), "both": (False, True)}
"""--protection of kvp eval -> whether first and last tokens are kept, in the order of tables."""
Flags = dict[str, str]
"""Flags of a program without their dashes."""
ItemT = TypeVar("ItemT")


@dataclass(frozen=True, kw_only=True)
class Arm:
    """One of the things compared."""

    name: str
    settings: Flags
    """Flags of kvp train."""
    tuned: tuple[str, ...] = ()
    """Flags that are tuned, one after the other; each needs a grid."""
    seeds: int
    complete: bool = False
    """Whether the flags that the arms share are left out, for a preset as it is."""


@dataclass(frozen=True, kw_only=True)
class Grid:
    """Values of a flag that is tuned."""

    values: tuple[str, ...]
    first: str
    """Where the climb begins."""


@dataclass(frozen=True, kw_only=True)
class Tuning:
    """How the flags of arms are chosen on validation sequences."""

    seed: int
    grids: dict[str, Grid] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Settings:
    """A whole study."""

    collect: Flags
    """Flags of kvp collect."""
    train: Flags
    """Flags of kvp train that arms share."""
    tuning: Tuning
    evaluate: Flags
    """Flags of kvp eval."""
    reference: str
    """Name of the arm that the others are compared with."""
    arms: tuple[Arm, ...]
    """The most important first."""

    def arm(self, name: str) -> Arm:
        """An arm by its name; SystemExit where there is none."""
        for arm in self.arms:
            if arm.name == name:
                return arm
        names = ", ".join(arm.name for arm in self.arms)
        raise SystemExit(f"there is no arm {name!r}; use some of {names}")


def load_settings(path: Path) -> Settings:
    """Read a settings file; SystemExit with one line where it cannot be used."""
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
        seeds = content.pop("seeds")
        arms = tuple(
            _item(Arm, {"seeds": seeds, **arm, "settings": _flags(arm["settings"])})
            for arm in content.pop("arms")
        )
        tuning = dict(content.pop("tuning"))
        grids = {
            name: Grid(values=tuple(map(str, grid["values"])), first=str(grid["first"]))
            for name, grid in tuning.pop("grids", {}).items()
        }
        programs = {name: _flags(content.pop(name)) for name in ("collect", "train", "evaluate")}
        settings = _item(
            Settings,
            {
                **content,
                **programs,
                "tuning": _item(Tuning, {**tuning, "grids": grids}),
                "arms": arms,
            },
        )
        _check(settings)
    except OSError as error:
        raise SystemExit(f"{path}: {error.strerror}") from None
    except (yaml.YAMLError, KeyError, TypeError, AttributeError, ValueError) as error:
        reason = f"{error.args[0]!r} is missing" if isinstance(error, KeyError) else error
        raise SystemExit(f"{path} is no settings file of a study: {reason}") from None
    return settings


def _check(settings: Settings) -> None:
    names = [arm.name for arm in settings.arms]
    if len(set(names)) < len(names):
        raise ValueError("two arms have one name")
    _check_evaluation(settings.evaluate)
    if settings.reference not in names:
        raise ValueError(f"the reference {settings.reference!r} is no arm")
    for name, grid in settings.tuning.grids.items():
        if grid.first not in grid.values:
            raise ValueError(f"the grid of {name} has no value {grid.first!r}")
    for arm in settings.arms:
        if arm.seeds < 1:
            raise ValueError(f"arm {arm.name} needs a seed")
        if missing := set(arm.tuned) - settings.tuning.grids.keys():
            raise ValueError(f"arm {arm.name} tunes {min(missing)}, which has no grid")


def _check_evaluation(flags: Flags) -> None:
    if missing := [name for name in ("allocators", "budgets", "protection") if name not in flags]:
        raise ValueError(f"evaluate needs {missing[0]}")
    if flags["protection"] not in PROTECTIONS:
        raise ValueError(f"protection is one of {', '.join(PROTECTIONS)}")


def _item(kind: type[ItemT], content: Mapping[str, Any]) -> ItemT:
    known = {one.name for one in fields(kind)}  # type: ignore[arg-type]
    if unknown := content.keys() - known:
        raise ValueError(f"{min(unknown)!r} is unknown; use {', '.join(sorted(known))}")
    lists = {name: tuple(value) for name, value in content.items() if isinstance(value, list)}
    return kind(**{**content, **lists})


def _flags(content: Mapping[str, Any]) -> Flags:
    """Values as a command line has them."""
    return {
        name: str(value).lower() if isinstance(value, bool) else str(value)
        for name, value in content.items()
    }
