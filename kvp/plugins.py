"""Find a component by name: built in, from an installed package, or `package.module:Name`.

A registry maps names to `module:attribute` strings, so that it imports nothing heavy: the module of
a component is imported when its name is asked for. Other packages add to a registry by an entry
point of its group,

    [project.entry-points."kvp.labels"]
    newest = "my_package:NEWEST"

and a component that is not installed at all is named as `package.module:Name` on the command line;
modules in the working folder are found, too, after all installed ones.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from importlib.metadata import entry_points
from typing import Any

from kvp.errors import UsageError


@dataclass(frozen=True)
class Registry:
    """Components of one kind."""

    flag: str
    """Flag that names a component, for messages: `--label`."""
    group: str
    """Entry point group of other packages: `kvp.labels`."""
    builtin: Mapping[str, str]
    """Name -> `module:attribute`."""

    def names(self) -> list[str]:
        """Every name without a module: built in and installed, in this order."""
        installed = sorted({point.name for point in entry_points(group=self.group)})
        return [*self.builtin, *(name for name in installed if name not in self.builtin)]

    def check(self, name: str) -> None:
        """Raise ValueError unless a name can stand for a component; nothing is imported."""
        if ":" not in name and name not in self.builtin and name not in self.names():
            raise ValueError(f"{self.flag} {name!r} is unknown{_meant(name, self.names())}")

    def load(self, name: str) -> Any:  # noqa: ANN401
        """The component of a name.

        Raises UsageError, naming the flag, where there is none or its module cannot be imported.
        """
        if name in self.builtin:
            return _attribute(self.builtin[name])
        points = {point.value: point for point in entry_points(group=self.group, name=name)}
        if len(points) > 1:
            raise UsageError(f"{self.flag} {name}: offered twice, by {' and '.join(points)}")
        if not points and ":" not in name:
            raise UsageError(f"{self.flag} {name!r} is unknown{_meant(name, self.names())}")
        try:
            return next(iter(points.values())).load() if points else _attribute(name)
        except Exception as error:  # foreign code may raise anything
            reason = f"{type(error).__name__}: {error}"
            raise UsageError(f"{self.flag} {name} cannot be loaded ({reason})") from error


def _meant(name: str, names: Iterable[str]) -> str:
    known = list(names)
    near = get_close_matches(name, known, n=1)
    guess = f" (did you mean {near[0]}?)" if near else ""
    return f"{guess}; use {', '.join(known)} or package.module:Name"


def _attribute(path: str) -> Any:  # noqa: ANN401
    """The object at `module:attribute`; the working folder is searched last."""
    module, _, attribute = path.partition(":")
    here = os.getcwd()
    if here in sys.path or "" in sys.path:
        return getattr(importlib.import_module(module), attribute)
    sys.path.append(here)
    try:
        return getattr(importlib.import_module(module), attribute)
    finally:
        sys.path.remove(here)
