"""The grammar of methods on a command line, and the inputs of a scorer in words.

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
from dataclasses import dataclass

from kvp.errors import UsageError
from kvp.scoring import ALL_QUERIES, Needs
from policies.base import Value

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
