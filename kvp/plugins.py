"""Other people's code by name: an entry point's, or `package.module:Name` on a command line.

Nothing is imported before its name is asked for. Whatever goes wrong inside foreign code, an exit
included, becomes one line that names it.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import re
import sys
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from kvp.errors import UsageError

_OBJECT = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")


def is_object_name(name: str) -> bool:
    """Whether `name` is written `package.module:Name`."""
    return _OBJECT.fullmatch(name) is not None


def module_exists(name: str) -> bool:
    """Whether the module of `package.module:Name` can be found."""
    _add_working_folder()
    try:
        return importlib.util.find_spec(name.partition(":")[0]) is not None
    except (ImportError, ValueError):
        return False


def load_object(name: str, flag: str) -> Any:  # noqa: ANN401
    """The object `package.module:Name`; raises UsageError naming `flag` where it cannot be had.

    Modules of the working folder are found, too, after all installed ones.
    """
    module, _, path = name.partition(":")
    _add_working_folder()
    try:
        found = importlib.import_module(module)
        for part in path.split("."):
            found = getattr(found, part)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # foreign code: SystemExit and all
        raise UsageError(f"--{flag} {name}: cannot be loaded ({reason_of(error)})") from error
    return found


def _add_working_folder() -> None:
    folder = os.getcwd()
    if folder not in sys.path and "" not in sys.path:
        sys.path.append(folder)  # last: a train.py of the user's shadows nothing


def plugin_names(group: str) -> list[str]:
    """Names in a group of entry points, sorted; nothing is imported."""
    return sorted({point.name for point in entry_points(group=group)})


def find_plugin(group: str, name: str) -> EntryPoint | None:
    """The entry point of that name, None without one; UsageError where two packages offer it."""
    found = {
        (package_of(point), point.value): point for point in entry_points(group=group, name=name)
    }
    if len(found) > 1:
        packages = " and ".join(sorted(package for package, _ in found))
        raise UsageError(f"{group} {name!r} is offered by {packages}: uninstall one")
    return next(iter(found.values()), None)


def load_plugin(point: EntryPoint) -> Any:  # noqa: ANN401
    """What an entry point names; UsageError names its package where it cannot be loaded."""
    try:
        return point.load()
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # foreign code: SystemExit and all
        raise unusable(point, reason_of(error)) from error


def unusable(point: EntryPoint, reason: str) -> UsageError:
    """The error that says why an entry point cannot be used."""
    return UsageError(
        f"package {package_of(point)}: {point.group} {point.name!r} ({point.value}) cannot be "
        f"used: {' '.join(reason.split())}"
    )


def package_of(point: EntryPoint) -> str:
    """The distribution that an entry point comes with."""
    return point.dist.name if point.dist is not None else "unknown"


def reason_of(error: BaseException) -> str:
    """An exception in one line: its kind and its message."""
    return " ".join(f"{type(error).__name__}: {error}".split())
