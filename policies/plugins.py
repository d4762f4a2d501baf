"""Scorers and allocators of other people's packages, found through entry points.

A package that is installed beside kvp names its classes in its own pyproject.toml:

    [project.entry-points."kvp.scorers"]
    newest = "my_package:Newest"

Nothing of it is imported before its name is asked for, or all names are. Contract: the class is a
dataclass whose `method` is the entry's name; a scorer is what `policies.base.Heuristic` plus
`score` gives, all options with defaults, an allocator what `policies.base.Split` plus `allocate`
gives. The first line of its docstring is printed by `kvp-eval --list`, with its `cost`, if it has
one. A plugin cannot take the name of something built in.
"""

from __future__ import annotations

from collections.abc import Container
from dataclasses import is_dataclass
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from kvp.errors import UsageError
from kvp.scoring import Needs
from policies.method_spec import AllocatorEntry, ScorerEntry

SCORERS = "kvp.scorers"
"""Entry point group of scorers."""
ALLOCATORS = "kvp.allocators"
"""Entry point group of allocators."""

_UNTOLD = "not stated"


def plugin_names(group: str) -> list[str]:
    """Names in a group, sorted; nothing is imported."""
    return sorted({point.name for point in entry_points(group=group)})


def plugin_scorer(name: str) -> ScorerEntry | None:
    """The scorer of that name, None without one; UsageError names the package if it is unusable."""
    point = _point(SCORERS, name)
    if point is None:
        return None
    builder = _load(point, "score")
    try:
        needs = builder().needs
    except Exception as error:
        raise _unusable(point, f"it cannot be made with its defaults: {error}") from error
    if not isinstance(needs, Needs):
        raise _unusable(point, "its needs are not kvp.scoring.Needs")
    return ScorerEntry(builder=builder, line=_line(point, builder), cost=_cost(builder))


def plugin_allocator(name: str) -> AllocatorEntry | None:
    """The allocator of that name, None without one; raises as `plugin_scorer`."""
    point = _point(ALLOCATORS, name)
    if point is None:
        return None
    builder = _load(point, "allocate")
    return AllocatorEntry(
        builder=builder, line=_line(point, builder), cost=_cost(builder), needs=_UNTOLD
    )


def check_shadows(group: str, builtin: Container[str]) -> None:
    """Raise UsageError when an installed plugin has the name of something built in."""
    for point in entry_points(group=group):
        if point.name in builtin:
            raise _unusable(point, f"kvp has its own {point.name!r}; rename it")


def _point(group: str, name: str) -> EntryPoint | None:
    found = {
        (_package(point), point.value): point for point in entry_points(group=group, name=name)
    }
    if len(found) > 1:
        packages = " and ".join(sorted(package for package, _ in found))
        raise UsageError(f"{group} {name!r} is offered by {packages}: uninstall one")
    return next(iter(found.values()), None)


def _load(point: EntryPoint, does: str) -> Any:  # noqa: ANN401
    try:
        builder = point.load()
    except Exception as error:
        raise _unusable(point, f"{type(error).__name__}: {error}") from error
    if not (isinstance(builder, type) and is_dataclass(builder)):
        raise _unusable(point, "it is not a dataclass")
    missing = [part for part in ("method", "presets", "name", does) if not hasattr(builder, part)]
    if missing:
        raise _unusable(point, f"it has no {' and no '.join(missing)}")
    if builder.method != point.name:  # type: ignore[attr-defined]
        raise _unusable(point, f"its method is called {builder.method!r}")  # type: ignore[attr-defined]
    return builder


def _unusable(point: EntryPoint, why: str) -> UsageError:
    reason = " ".join(why.split())
    return UsageError(
        f"package {_package(point)}: {point.group} {point.name!r} ({point.value}) cannot be used: "
        f"{reason}"
    )


def _package(point: EntryPoint) -> str:
    return point.dist.name if point.dist is not None else "unknown"


def _line(point: EntryPoint, builder: type) -> str:
    told = (builder.__doc__ or "").strip().partition("\n")[0].rstrip(".")
    return f"{told or point.value} (from {_package(point)})"


def _cost(builder: type) -> str:
    return str(getattr(builder, "cost", _UNTOLD))
