"""What a method or an allocator declares itself with: its options, presets, grid and needs.

Both are frozen dataclasses whose fields are their options; `policies.registry` has the table of
those that kvp brings. Objects of others need no base class, only `name` and `score` or `allocate`.
"""

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import MISSING, dataclass, fields, replace
from functools import cached_property
from itertools import chain
from typing import Any, ClassVar, Final, Literal, Self

import torch
from torch import Tensor

from kvp.allocation import Request
from kvp.errors import UsageError, did_you_mean
from kvp.field_checks import check_fields, check_value
from kvp.scoring import Needs, View
from kvp.specification import Value, read_value

Auto = Literal["auto"]
AUTO: Final = "auto"
"""Value of an option that follows the budget or the model."""

FORCED = 2.0
"""Score of tokens that are always kept, newest first, for methods whose others are at most 1."""

Presets = Mapping[str, Mapping[str, Any]]
"""Published settings: preset name -> options."""

Grid = Mapping[str, Sequence[Value]]
"""Option -> values that `kvp tune` tries: all choices and `auto`, and numbers, beyond whose ends it
goes on by halves and doubles while the best is at one."""


@dataclass(frozen=True, kw_only=True)
class Component:
    """Base of scorers and allocators; `kvp list` prints the docstring of each."""

    base_name: ClassVar[str]
    """Name without options and preset, as in `kvp.names`."""
    cost: ClassVar[str] = "nothing"
    """Its cost in addition to the prefill, in words."""
    presets: ClassVar[Presets] = {}
    grid: ClassVar[Grid] = {}
    """The most important option comes first."""

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if "__repr__" not in vars(cls):  # a dataclass would make one of its own
            cls.__repr__ = Component.__repr__  # type: ignore[method-assign]

    def __repr__(self) -> str:
        return self.name

    def __post_init__(self) -> None:
        if type(self).name is Component.name and not hasattr(self, "base_name"):
            raise UsageError(f"{type(self).__name__} has no base_name, its name without options")
        self.check_options(chain(self.grid, *self.presets.values()))
        grid = [{name: value} for name, values in self.grid.items() for value in values]
        where = f"presets or grid of {type(self).__name__}"
        check_fields(self, self.base_name, UsageError)
        for settings in (*self.presets.values(), *grid):
            for name, value in settings.items():
                check_value(type(self), name, value, where, UsageError)
        self._refuse_fixed_name()

    def _refuse_fixed_name(self) -> None:
        """Raise UsageError where a name of a class's own is the same for other options."""
        options = [item for item in fields(self) if item.init and item.default is not MISSING]
        usual = {item.name: item.default for item in options}
        changed = type(self).name is not Component.name and not usual.items() <= vars(self).items()
        if changed and self.name == replace(self, **usual).name:
            raise UsageError(
                f"{type(self).__name__}: its own name {self.name!r} is the same for "
                f"other options ({self.changed_options}): set base_name, not name"
            )

    @cached_property
    def name(self) -> str:
        """Specification that the registry turns into an equal object.

        `base_name` for its defaults, `base_name:preset` for a preset, else the options that differ
        from the defaults: `snapkv(window=16,pool=avg)`.
        """
        defaults = {item.name: item.default for item in fields(self)}
        options = {name: getattr(self, name) for name in defaults}
        if options == defaults:
            return self.base_name
        for preset, settings in self.presets.items():
            if options == {**defaults, **settings}:
                return f"{self.base_name}:{preset}"
        return f"{self.base_name}({self.changed_options})"

    @property
    def changed_options(self) -> str:
        """The options that differ from the defaults: `window=16,pool=avg`."""
        names = [item.name for item in fields(self) if getattr(self, item.name) != item.default]
        return ",".join(f"{name}={_text(getattr(self, name))}" for name in names)

    @classmethod
    def build(cls, argument: str | None, options: Mapping[str, str]) -> Self:
        """Make one from what follows the name; UsageError on an unknown preset or option."""
        if argument is not None and argument not in cls.presets:
            names = ", ".join(cls.presets) or "none"
            raise UsageError(f"{cls.base_name} has no preset {argument!r}: its presets are {names}")
        return cls(**{**(cls.presets[argument] if argument else {}), **cls.read_options(options)})

    @classmethod
    def read_options(cls, texts: Mapping[str, str]) -> dict[str, Value]:
        """Values by option, texts where it takes them as they are. UsageError on unknown ones."""
        cls.check_options(texts)
        values: dict[str, Value] = {name: read_value(text) for name, text in texts.items()}
        for name, text in texts.items():
            with suppress(ValueError):
                values[name] = check_value(cls, name, text)
        return values

    @classmethod
    def check_options(cls, names: Iterable[str]) -> None:
        """Raise UsageError on a name that no option has."""
        component = getattr(cls, "base_name", cls.__name__)
        known = [item.name for item in fields(cls)]
        for name in names:
            if name not in known:
                why = f"its options are {', '.join(known) or 'none'}"
                if name in cls.__annotations__ and "__dataclass_fields__" not in vars(cls):
                    why = f"{cls.__name__} lacks @dataclass(frozen=True, kw_only=True)"
                hint = did_you_mean(name, known)
                raise UsageError(f"{component} has no option {name!r}{hint}: {why}")


@dataclass(frozen=True, kw_only=True)
class BaseScorer(Component):
    """A method that scores tokens; it adds its options and `score`."""

    @property
    def needs(self) -> Needs:
        """Nothing but keys, values and positions."""
        return Needs()

    def score(self, view: View) -> Tensor:
        """Score every token of one layer (`kvp.scoring.Scorer`): [B, H, N] float32."""
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class BaseAllocator(Component):
    """An allocator; it adds its options, `allocate` and some of `kvp.allocation.AllocatorParts`."""

    reads: ClassVar[str] = "nothing"
    """What it takes of a scorer, in words."""

    def allocate(self, request: Request) -> Tensor:
        """Tokens per layer and KV head (`kvp.allocation.Allocator`): [L, H] int64."""
        raise NotImplementedError


def keyed_generator(key: str) -> torch.Generator:
    """A generator on the CPU whose numbers depend on `key` alone."""
    digest = hashlib.sha256(key.encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))


def _text(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float):
        short = f"{value:g}"
        return short if float(short) == value else repr(value)
    return str(value)
