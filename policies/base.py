"""What a method or an allocator declares itself with: its options, presets, limits and needs.

Both are frozen dataclasses whose fields are their options; `policies.registry` has the table of
those that kvp brings. Objects of others need no base class, only `name` and `score` or `allocate`.
"""

import hashlib
import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, fields, replace
from functools import cached_property
from itertools import chain
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from kvp.allocation import Request
from kvp.errors import UsageError, did_you_mean
from kvp.scoring import Needs, View
from kvp.specification import Value, read_value

AUTO = "auto"
"""Value of an option that follows the budget or the model; its limit tells the type of others."""

FORCED = 2.0
"""Score above every probability: of tokens that a method always keeps, newest first."""

Presets = Mapping[str, Mapping[str, Any]]
"""Published settings: preset name -> options."""

Limits = Mapping[str, Any]
"""What options may be: a number its least value (0 where it has none here), or least and largest;
text its choices. Of an option whose default is None or missing the limit says which it is."""

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
    limits: ClassVar[Limits] = {}
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
        self.check_options(chain(self.limits, self.grid, *self.presets.values()))
        grid = [{name: value} for name, values in self.grid.items() for value in values]
        where = f"presets or grid of {type(self).__name__}"
        for option in fields(self):
            name, limit = option.name, self.limits.get(option.name)
            value = _checked_value(self.base_name, option, limit, getattr(self, name))
            object.__setattr__(self, name, value)
            for settings in (*self.presets.values(), *grid):
                if name in settings:
                    _checked_value(where, option, limit, settings[name])
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
            known = ", ".join(cls.presets) or "none"
            raise UsageError(f"{cls.base_name} has no preset {argument!r}: its presets are {known}")
        return cls(**{**(cls.presets[argument] if argument else {}), **cls.read_options(options)})

    @classmethod
    def read_options(cls, texts: Mapping[str, str]) -> dict[str, Value]:
        """Values by option; an option of type `str` keeps its text. UsageError on unknown ones."""
        cls.check_options(texts)
        kept = [option.name for option in fields(cls) if option.type in (str, "str")]
        return {name: text if name in kept else read_value(text) for name, text in texts.items()}

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


def _checked_value(owner: str, option: Field[Any], limit: Any, value: Any) -> Any:  # noqa: ANN401
    """The value in its option's type; UsageError, which begins with `owner`, for a bad one."""
    like = option.default  # a value of the option's type
    if like is MISSING:  # the annotation tells the type, or else the limit
        like = next((t() for t in (bool, int, float) if option.type in (t, t.__name__)), None)
    if like is None and limit is None:
        return value
    limits = _limits(owner, option.name, 0 if limit is None else limit)
    if like in (None, AUTO):  # the limit tells the type
        if value == option.default:
            return value
        like = limits[0]
    if isinstance(like, bool) or isinstance(limits[0], str):
        choices = limits if isinstance(limit, Iterable) else (False, True)
        checked, wanted = _find_choice(value, choices), f"one of {', '.join(map(_text, choices))}"
    elif isinstance(like, int | float):
        whole = not isinstance(like, float) and "float" not in str(option.type)
        checked = _fit_number(value, *limits, whole=whole)
        least, largest = limits
        bounds = f">= {least:g}" if largest == math.inf else f"from {least:g} to {largest:g}"
        wanted = f"{'an integer' if whole else 'a number'} {bounds}"
        wanted += " or auto" if option.default == AUTO else ""
        wanted += " (or as limits say)" if value == option.default else ""
    else:
        return value
    if checked is None:
        raise UsageError(f"{owner}: {option.name} must be {wanted}, got {value!r}")
    return checked


def _limits(owner: str, name: str, limit: Any) -> tuple[Any, ...]:  # noqa: ANN401
    """Least and largest number, or choices; UsageError for neither."""
    limits = tuple(limit) if isinstance(limit, Iterable) else (limit, math.inf)
    if isinstance(limit, str) or not (limits and (len(limits) == 2 or isinstance(limits[0], str))):
        which = "a least number, (least, largest) or choices"
        raise UsageError(f"{owner}: limits of {name} are {which}, got {limit!r}")
    return limits


def _find_choice(value: object, choices: Iterable[Any]) -> Any:  # noqa: ANN401
    """The choice that a value is, as itself or as its text is read; None for none."""
    forms = [(choice, form) for choice in choices for form in (choice, read_value(_text(choice)))]
    typed = type(value), value
    return next((choice for choice, form in forms if (type(form), form) == typed), None)


def _fit_number(value: Any, least: float, largest: float, *, whole: bool) -> int | float | None:  # noqa: ANN401
    """A number within its limits, as an integer where it is `whole`, else as a float; or None."""
    if isinstance(value, bool) or not isinstance(value, int if whole else int | float):
        return None
    if not least <= value <= largest or abs(value) > sys.float_info.max:
        return None
    return value if whole else float(value)
