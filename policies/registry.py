"""Scorers and allocators: what they have in common, how a user names them, and which there are.

Both are frozen dataclasses whose fields are their options. As a user writes them:

    snapkv                              the method's defaults
    snapkv:kvpress                      a published preset
    snapkv(window=16,pool=avg)          options; they may follow a preset, too
    evolved:runs/evolve                 a file, for what is made from one
    package.module:Name(step=3)         a class or an object of your own
    snapkv:kvpress+ada(safeguard=0.3)   a scorer and an allocator

Files may have any name without comma, plus sign and parentheses. `kvp.program.names` lists them.
Objects of others need no base class, only `name` and `score` (or `name` and `allocate`).
Learned policies are not named here: they are directories (`policies.policy_files`).
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any, ClassVar, NamedTuple, Self

from torch import Tensor

from kvp.errors import UsageError
from kvp.plugins import import_object, instance_of, is_object_name, module_exists
from kvp.program import names as known_names
from kvp.program.names import split_method, unknown_name
from kvp.ranking import Allocator, Request
from kvp.scoring import ALL_QUERIES, Needs, Scorer, SelfSizing, View, as_scorer

AUTO = "auto"
"""Value of an option that follows the budget, or the model."""

Value = int | float | str | bool
"""Types of an option in a specification."""

Presets = Mapping[str, Mapping[str, Any]]
"""Published settings: preset name -> options."""

Limits = Mapping[str, Any]
"""What options may be: an integer its least value (0 where it has none here), a number its least
and its largest (0 and infinity), text its choices."""


Grid = Mapping[str, Sequence[Value]]
"""Option -> values that `kvp tune` tries: all choices and `auto`, and numbers, beyond whose ends it
goes on by halves and doubles while the best is at one."""

SHARES = (0.0, 0.05, 0.1, 0.2, 0.35, 0.5, 0.7, 1.0)
"""Shares of a budget."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """Base of scorers and allocators: a name that follows from the options."""

    method: ClassVar[str]
    """Name in `kvp.program.names`."""
    line: ClassVar[str]
    """One line on what it keeps."""
    cost: ClassVar[str] = "nothing"
    """Its cost in addition to the prefill, in words."""
    presets: ClassVar[Presets] = {}
    """Published settings."""
    limits: ClassVar[Limits] = {}
    """What each option may be."""
    grid: ClassVar[Grid] = {}
    """Values that `kvp tune` tries, by option; the most important option first."""
    file_option: ClassVar[str | None] = None
    """Option given after the colon where others have their preset: a file."""

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if "__repr__" not in vars(cls):  # a dataclass would make one of its own
            cls.__repr__ = Options.__repr__  # type: ignore[method-assign]

    def __repr__(self) -> str:
        """As `--methods` accepts it."""
        return self.name

    def __post_init__(self) -> None:
        """Raise UsageError on an option outside its `limits`."""
        for option in fields(self):
            value = getattr(self, option.name)
            wanted = _required_value(value, option.default, self.limits.get(option.name))
            if wanted:
                raise UsageError(f"{self.method}: {option.name} must be {wanted}, got {value!r}")

    @cached_property
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
        """Whether its counts add up to the budget; not where a scorer gives the sizes."""
        return not self.sized_by_scorer

    def allocate(self, request: Request) -> Tensor:
        """Tokens per layer and KV head (`kvp.ranking.Allocator`): [L, H] int64."""
        raise NotImplementedError


def _text(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float):
        short = f"{value:g}"
        return short if float(short) == value else repr(value)
    return str(value)


def _required_value(value: Any, default: object, limit: Any) -> str | None:  # noqa: ANN401
    """What an option with this default must be where `value` is not; None where it may be it."""
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if isinstance(default, float):
        least, largest = limit or (0, math.inf)
        fits = number and least <= value <= largest and value != math.inf
        bounds = f">= {least:g}" if largest == math.inf else f"from {least:g} to {largest:g}"
        wanted = f"a number {bounds}"
    elif isinstance(default, bool) or isinstance(limit, tuple):
        choices = limit or (False, True)
        fits = any(value == choice and type(value) is type(choice) for choice in choices)
        wanted = f"one of {', '.join(map(_text, choices))}"
    elif isinstance(default, int) or default == AUTO:
        least = limit or 0
        fits = default == AUTO == value or (type(value) is int and value >= least)
        wanted = f"an integer >= {least}" + (" or auto" if default == AUTO else "")
    else:
        return None
    return None if fits else wanted


PLAIN = "keys, values, positions"
"""Inputs that every method may read."""


def needs_in_words(needs: Needs) -> str:
    """Inputs of a scorer, in words: `last 32 queries`, `hidden states, rotary embedding`."""
    words = []
    if needs.future:
        words.append("future attention")
    if needs.queries == ALL_QUERIES:
        words.append("every query")
    elif needs.queries:
        words.append("last query" if needs.queries == 1 else f"last {needs.queries} queries")
    others = (
        (needs.hidden_after is not None and not needs.every_state, "hidden states"),
        (needs.every_state, "every hidden state"),
        (needs.rope, "rotary embedding"),
        (needs.reconstruction is not None, "extra passes that repeat the context"),
        (needs.noise is not None, "an extra pass of random tokens"),
        (needs.question, "where the question begins"),
        (needs.text > 0, "the prompt's text"),
    )
    words += [word for needed, word in others if needed]
    return ", ".join(words) or PLAIN


def sizes_itself(allocator: object) -> bool:
    """Whether an allocator ignores the budget and takes the sizes that the scorer gives."""
    return bool(getattr(allocator, "sized_by_scorer", False))


@dataclass(frozen=True, kw_only=True)
class Specification:
    """A scorer or an allocator as written on a command line."""

    name: str
    argument: str | None
    """Part after the colon: a preset or a file; None without a colon."""
    options: Mapping[str, Value]


_INTEGER = re.compile(r"[+-]?\d+")
_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?")


def parse(text: str, kind: str) -> Specification:
    """Take a specification without plus sign apart; UsageError, naming the kind, where it cannot.

    `kind` is what messages call it: `method` or `allocator`.
    """
    front, inside = text.strip(), ""
    if front.endswith(")"):
        front, _, inside = front[:-1].partition("(")
    name, colon, argument = (part.strip() for part in front.partition(":"))
    if (
        re.fullmatch(r"[\w.-]+", name) is None
        or bool(colon) != bool(argument)
        or not set("(),+").isdisjoint(argument)
        or not {"(", ")"}.isdisjoint(inside)
        or (text.strip().endswith(")") and "(" not in text)
    ):
        raise UsageError(
            f"{kind} {text!r} is not of the form name, name:preset or name(option=value)"
            + ", without an allocator" * ("+" in text)
        )
    options = _parse_options(name, inside)
    return Specification(name=name, argument=argument or None, options=options)


def _parse_options(name: str, text: str) -> dict[str, Value]:
    options: dict[str, Value] = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        option, equals, value = (piece.strip() for piece in part.partition("="))
        if not equals or not option or not value:
            raise UsageError(f"{name}: {part!r} is not of the form option=value")
        if option in options:
            raise UsageError(f"{name}: option {option!r} is given twice")
        if value.lower() in ("true", "false"):
            options[option] = value.lower() == "true"
        elif _INTEGER.fullmatch(value):
            options[option] = int(value)
        else:
            options[option] = float(value) if _NUMBER.fullmatch(value) else value
    return options


def attention_free(method: str) -> bool:
    """Whether a built-in method reads keys, values and positions only."""
    return method in METHODS and needs_in_words(METHODS[method]().needs) == PLAIN


def make_scorer(spec: str | Scorer | type[Scorer], **options: Value) -> Scorer:
    """Build a scorer.

    Args:
        spec: a specification (`snapkv`, `snapkv:paper`, `snapkv(window=16)`,
            `kvzap:FOLDER`, `package.module:Name`), a scorer, which is returned, or a class of
            scorers.
        options: override those of the specification.

    Raises:
        UsageError: in one line, on an unknown method, preset or option, a value that is not
            allowed, an object that cannot be used or takes a built-in name.
    """
    thing, label = spec, f"method {_label(spec)}"
    if isinstance(spec, str):
        written = parse(spec, "method")
        options = {**written.options, **options}
        if written.name in METHODS:
            return METHODS[written.name].build(written.argument, options)
        if written.name in FROM_OUTSIDE:
            return FROM_OUTSIDE[written.name](written.argument, options)
        thing, label = _named_object(written, "method", {**METHODS, **FROM_OUTSIDE})
    scorer = as_scorer(instance_of(thing, label, options))
    if not isinstance(scorer, Scorer) or not isinstance(scorer.needs, Needs):
        raise UsageError(
            f"{label} is no scorer: it takes name, needs (kvp.scoring.Needs) and score(view)"
        )
    name = re.split(r"[:(]", scorer.name)[0]
    if type(scorer) is not METHODS.get(name, type(scorer)):  # results would be mixed up
        raise UsageError(f"{label}: kvp has its own {name!r}; give it another name")
    return scorer


def make_allocator(spec: str | Allocator | type[Allocator]) -> Allocator:
    """Build an allocator from a specification, an object or a class, as `make_scorer`.

    Raises UsageError as `make_scorer`, PolicyError on a damaged budget file.
    """
    thing, label, options = spec, f"allocator {_label(spec)}", None
    if isinstance(spec, str):
        written = parse(spec, "allocator")
        if written.name in ALLOCATORS:
            return ALLOCATORS[written.name].build(written.argument, written.options)
        (thing, label), options = _named_object(written, "allocator", ALLOCATORS), written.options
    allocator = instance_of(thing, label, options)
    if not isinstance(allocator, Allocator):
        raise UsageError(f"{label} is no allocator: it takes name and allocate(request)")
    return allocator


class ScorerAndAllocator(NamedTuple):
    """Both sides of a method; printed as `--methods` accepts it."""

    scorer: Scorer
    allocator: Allocator

    def __repr__(self) -> str:
        return f"{self.scorer.name}+{self.allocator.name}"


def make_method(
    spec: str | Scorer | type[Scorer], allocator: str | Allocator | type[Allocator] | None = None
) -> ScorerAndAllocator:
    """Build both sides of `SCORER[+ALLOCATOR]`, uniform without the second.

    The second side may be given as `allocator` instead. Raises as `make_scorer` and
    `make_allocator`; UsageError, too, when both are given, and when the allocator takes the sizes
    of a scorer that has none.
    """
    left, right = split_method(spec) if isinstance(spec, str) else (spec, None)
    if right is not None and allocator is not None:
        raise UsageError(f"{spec}: the allocator is given twice")
    rule = allocator if right is None else right
    scorer, made = make_scorer(left), make_allocator("uniform" if rule is None else rule)
    if sizes_itself(made) and not isinstance(scorer, SelfSizing):
        raise UsageError(
            f"{scorer.name}+{made.name}: {scorer.name} does not say how many tokens it needs; "
            f"choose an allocator other than {made.name}"
        )
    return ScorerAndAllocator(scorer, made)


def _named_object(
    written: Specification, kind: str, known: Mapping[str, object]
) -> tuple[Any, str]:
    """The class or object that `package.module:Name` names, and its name in messages.

    A name without a dot counts only if there is such a module, so that a misspelt method is not
    taken for one. Raises UsageError, naming the kind, where there is none.
    """
    name = f"{written.name}:{written.argument}"
    if is_object_name(name) and ("." in written.name or module_exists(name)):
        return import_object(name, kind), f"{kind} {name}"
    raise UsageError(unknown_name(kind, written.name, written.argument, known))


def _label(thing: object) -> str:
    return thing.__name__ if isinstance(thing, type) else type(thing).__name__


# The files of methods and allocators import the classes above from here.
METHODS: Mapping[str, type[Heuristic]] = {
    name: import_object(path, "method") for name, path in known_names.SCORERS.items()
}
"""Built-in scorers: method name -> class."""

NULLS = tuple(name for name, kind in METHODS.items() if kind.null)
"""Scorers that score nothing: a method that does not beat them has learned nothing of a prompt."""

ALLOCATORS: Mapping[str, type[BaseAllocator]] = {
    name: import_object(path, "allocator") for name, path in known_names.ALLOCATORS.items()
}
"""Built-in allocators: name -> class."""

FROM_OUTSIDE: Mapping[str, Callable[[str | None, Mapping[str, Value]], Scorer]] = {
    "kvzap": import_object("policies.kvzap:kvzap_scorer", "method")
}
"""Methods whose weights or code do not come with kvp, written `NAME:WHAT`, by name: from what
stands behind the colon and the options to the scorer."""
