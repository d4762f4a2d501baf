"""Options of methods and allocators: one-line refusals, and names from which they can be rebuilt.

Both are frozen dataclasses whose fields are their options. Which exist is `kvp.known_names`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Self

from torch import Tensor

from kvp.allocation import Request
from kvp.errors import UsageError
from kvp.scoring import Needs, View
from policies.grids import Grid

AUTO = "auto"
"""Value of an option that follows the budget, or the model."""

Value = int | float | str | bool
"""Types of an option in a specification."""

Presets = Mapping[str, Mapping[str, Any]]
"""Published settings: preset name -> options."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """Base of scorers and allocators: a name that follows from the options."""

    method: ClassVar[str]
    """Name in `kvp.known_names`."""
    line: ClassVar[str]
    """One line on what it keeps."""
    cost: ClassVar[str] = "nothing"
    """Its cost in addition to the prefill, in words."""
    presets: ClassVar[Presets] = {}
    """Published settings."""
    grid: ClassVar[Grid] = {}
    """Values that `kvp tune` tries, by option; the most important option first."""
    file_option: ClassVar[str | None] = None
    """Option given after the colon where others have their preset: a file."""

    @property
    def name(self) -> str:
        """Specification that the registry turns into an equal object.

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

    @classmethod
    def build(cls, argument: str | None, options: Mapping[str, Value]) -> Self:
        """Make one from what follows the name; UsageError on an unknown preset or option."""
        settings: dict[str, Any] = {}
        if cls.file_option is not None:
            settings = {cls.file_option: argument} if argument else {}
        elif argument is not None and argument not in cls.presets:
            known = ", ".join(cls.presets) or "none"
            raise UsageError(f"{cls.method} has no preset {argument!r}: its presets are {known}")
        elif argument is not None:
            settings |= cls.presets[argument]
        settings |= options
        names = option_names(cls)
        for option in settings:
            if option not in names:
                known = ", ".join(names) or "none"
                raise UsageError(f"{cls.method} has no option {option!r}: its options are {known}")
        if cls.file_option is not None:
            if not settings.get(cls.file_option):
                raise UsageError(f"{cls.method} needs a file: write {cls.method}:FILE")
            settings[cls.file_option] = str(settings[cls.file_option])
        return cls(**settings)


def option_names(kind: type[Options]) -> tuple[str, ...]:
    """Names of the options of a scorer or allocator."""
    return tuple(item.name for item in fields(kind))


@dataclass(frozen=True, kw_only=True)
class Heuristic(Options):
    """A method that scores tokens; it adds its options and `score`."""

    null: ClassVar[bool] = False
    """Whether it scores nothing: what every other method is compared with."""

    @property
    def needs(self) -> Needs:
        """Nothing but keys, values and positions."""
        return Needs()

    def score(self, view: View) -> Tensor:
        """Score every token of one layer (`kvp.scoring.Scorer`): [B, H, N] float32."""
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class BaseAllocator(Options):
    """An allocator; it adds its options and `allocate`."""

    reads: ClassVar[str] = "nothing"
    """What it takes of a scorer, in words."""
    sized_by_scorer: ClassVar[bool] = False
    """True if it ignores the budget and takes the sizes that the scorer gives."""

    @property
    def meets_budget(self) -> bool:
        """Whether its counts add up to the budget; not where sizes or a rounding are others'."""
        return not self.sized_by_scorer

    def allocate(self, request: Request) -> Tensor:
        """Tokens per layer and KV head (`kvp.allocation.Allocator`): [L, H] int64."""
        raise NotImplementedError


def _text(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float):
        short = f"{value:g}"
        return short if float(short) == value else repr(value)
    return str(value)


def check_integer(
    method: str, option: str, value: object, *, minimum: int, auto: bool = False
) -> None:
    """Raise UsageError unless `value` is an integer >= minimum (or `auto`, if that is allowed)."""
    if auto and value == AUTO:
        return
    if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
        wanted = f"an integer >= {minimum}" + (" or auto" if auto else "")
        raise UsageError(f"{method}: {option} must be {wanted}, got {value!r}")


def check_number(
    method: str, option: str, value: object, *, minimum: float = 0.0, maximum: float = math.inf
) -> None:
    """Raise UsageError unless `value` is a finite number from `minimum` to `maximum`."""
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not minimum <= value <= maximum or value == math.inf:  # type: ignore[operator]
        wanted = f">= {minimum:g}" if maximum == math.inf else f"from {minimum:g} to {maximum:g}"
        raise UsageError(f"{method}: {option} must be a number {wanted}, got {value!r}")


def check_choice(method: str, option: str, value: object, choices: tuple[object, ...]) -> None:
    """Raise UsageError unless `value` is one of `choices` (of the same type)."""
    if not any(value == choice and type(value) is type(choice) for choice in choices):
        wanted = ", ".join(_text(choice) for choice in choices)
        raise UsageError(f"{method}: {option} must be one of {wanted}, got {value!r}")
