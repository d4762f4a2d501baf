"""The grammar of methods on a command line, and how a registry entry is built from it.

    snapkv                              the method's defaults
    snapkv:kvpress                      a published preset
    snapkv(window=16,pool=avg)          options; they may follow a preset, too
    evolved:runs/evolve                 a file, for what is made from one
    package.module:Name(step=3)         a class or an object of your own
    snapkv:kvpress+ada(safeguard=0.3)   a scorer and an allocator

Files may have any name without comma, plus sign and parentheses. Which names exist is
`policies.registry`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Generic, Protocol, TypeVar

from kvp.allocation import Allocator
from kvp.errors import UsageError
from kvp.scoring import ALL_QUERIES, Needs, Scorer
from policies.base import Presets

Value = int | float | str | bool
"""Types of an option in a specification."""

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


class OptionsClass(Protocol[T_co]):
    """A frozen dataclass of options; calling it makes the scorer or allocator."""

    @property
    def method(self) -> str:
        """Name in the registry."""
        ...

    @property
    def presets(self) -> Presets:
        """Published settings."""
        ...

    def __call__(self, *args: Any, **options: Any) -> T_co:  # noqa: ANN401
        """Make one."""
        ...


@dataclass(frozen=True, kw_only=True)
class Entry(Generic[T]):
    """One entry of a registry."""

    builder: OptionsClass[T]
    """Class of the method or allocator."""
    line: str
    """One line on what it does."""
    cost: str
    """Its cost in addition to the prefill, in words."""
    file_option: str | None = None
    """Option given after the colon where others have their preset: a file."""

    @property
    def name(self) -> str:
        """First part of a specification."""
        return self.builder.method

    @property
    def presets(self) -> Presets:
        """Published settings by name."""
        return self.builder.presets

    @property
    def options(self) -> tuple[str, ...]:
        """Names of the options."""
        return tuple(item.name for item in fields(self.builder))  # type: ignore[arg-type]

    def build(self, argument: str | None, options: Mapping[str, Value]) -> T:
        """Make one from what follows the name; UsageError on an unknown preset or option."""
        settings: dict[str, Any] = {}
        if self.file_option is not None and argument:
            settings[self.file_option] = argument
        elif argument is not None and argument not in self.presets:
            known = ", ".join(self.presets) or "none"
            raise UsageError(f"{self.name} has no preset {argument!r}: its presets are {known}")
        elif argument is not None:
            settings |= self.presets[argument]
        settings |= options
        for option in settings:
            if option not in self.options:
                known = ", ".join(self.options) or "none"
                raise UsageError(f"{self.name} has no option {option!r}: its options are {known}")
        if self.file_option is not None:
            if not settings.get(self.file_option):
                raise UsageError(f"{self.name} needs a file: write {self.name}:FILE")
            settings[self.file_option] = str(settings[self.file_option])
        return self.builder(**settings)


@dataclass(frozen=True, kw_only=True)
class ScorerEntry(Entry[Scorer]):
    """One method of the registry."""

    null: bool = False
    """Whether it scores nothing: what every other method is compared with."""

    @property
    def attention_free(self) -> bool:
        """True if the method reads keys, values and positions only."""
        return needs_in_words(self.builder().needs) == PLAIN

    @property
    def needs(self) -> str:
        """Inputs of the method with its defaults, in words."""
        return needs_in_words(self.builder().needs)


@dataclass(frozen=True, kw_only=True)
class AllocatorEntry(Entry[Allocator]):
    """One allocator of the registry."""

    needs: str
    """Inputs of a scorer, in words."""

    @property
    def sized_by_scorer(self) -> bool:
        """True if it ignores the budget and takes the sizes that the scorer gives."""
        return sizes_itself(self.builder)


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
        (needs.classifier is not None, "a text classifier"),
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


_NAME = re.compile(r"[\w.-]+")
_PUNCTUATION = frozenset("(),+")
_SHOWN = 80  # characters of a specification in a message
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
        _NAME.fullmatch(name) is None
        or bool(colon) != bool(argument)
        or not _PUNCTUATION.isdisjoint(argument)
        or not {"(", ")"}.isdisjoint(inside)
        or (text.strip().endswith(")") and "(" not in text)
    ):
        shown = text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."
        raise UsageError(
            f"{kind} {shown!r} is not of the form name, name:preset or name(option=value)"
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
        options[option] = _parse_value(value)
    return options


def _parse_value(text: str) -> Value:
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    if _INTEGER.fullmatch(text):
        return int(text)
    return float(text) if _NUMBER.fullmatch(text) else text
