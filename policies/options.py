"""Options of methods: one-line refusals, and names from which a method can be rebuilt.

A method is a frozen dataclass; its fields are its options. Which methods exist is `roster`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, ClassVar

from kvp.errors import UsageError
from kvp.scoring import Needs

AUTO = "auto"
"""Value of an option that follows the budget."""

Presets = Mapping[str, Mapping[str, Any]]
"""Published settings: preset name -> options."""


@dataclass(frozen=True, kw_only=True)
class Heuristic:
    """What all methods of the roster share; a method adds its options and `score`."""

    method: ClassVar[str]
    """Roster name."""
    presets: ClassVar[Presets] = {}
    """Published settings."""

    @property
    def name(self) -> str:
        """Specification that `roster.make_scorer` turns into an equal scorer.

        The bare method for its defaults, `method:preset` for a preset, else the options that differ
        from the defaults: `snapkv(window=16,pool=avg)`.
        """
        defaults = {item.name: item.default for item in fields(self)}
        options = {name: getattr(self, name) for name in defaults}
        if options == defaults:
            return self.method
        for preset, settings in self.presets.items():
            if options == {**defaults, **settings}:
                return f"{self.method}:{preset}"
        changed = [
            f"{name}={_text(value)}" for name, value in options.items() if value != defaults[name]
        ]
        return f"{self.method}({','.join(changed)})"

    @property
    def needs(self) -> Needs:
        """Nothing beside keys, values and positions."""
        return Needs()


def _text(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def check_integer(
    method: str, option: str, value: object, *, least: int, auto: bool = False
) -> None:
    """Raise UsageError unless `value` is an integer >= least (or `auto`, where that is allowed)."""
    if auto and value == AUTO:
        return
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        wanted = f"an integer >= {least}" + (" or auto" if auto else "")
        raise UsageError(f"{method}: {option} must be {wanted}, got {value!r}")


def check_choice(method: str, option: str, value: object, choices: tuple[object, ...]) -> None:
    """Raise UsageError unless `value` is one of `choices` (of the same type)."""
    if not any(value == choice and type(value) is type(choice) for choice in choices):
        wanted = ", ".join(_text(choice) for choice in choices)
        raise UsageError(f"{method}: {option} must be one of {wanted}, got {value!r}")
