"""Every heuristic by name, and how a specification on a command line becomes a scorer.

    snapkv                              the method's defaults
    snapkv:kvpress                      a published preset
    snapkv(window=16,pool=avg)          options; they may follow a preset, too

Learned policies are not named here: they are directories (`policies.policy_files`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from kvp.errors import UsageError
from kvp.scoring import ALL_QUERIES, Scorer
from policies.h2o import H2O
from policies.keydiff import KeyDiff
from policies.knorm import KNorm
from policies.lagkv import LagKV
from policies.oracle import Oracle
from policies.random import Random
from policies.snapkv import SnapKV
from policies.streaming_llm import StreamingLLM
from policies.tova import TOVA

MethodClass = (
    type[Random]
    | type[StreamingLLM]
    | type[KNorm]
    | type[KeyDiff]
    | type[LagKV]
    | type[SnapKV]
    | type[TOVA]
    | type[H2O]
    | type[Oracle]
)


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One line of the roster."""

    builder: MethodClass
    """Frozen dataclass of the method's options; calling it makes a scorer."""
    line: str
    """What the method keeps, in one line."""

    @property
    def name(self) -> str:
        """What a specification starts with."""
        return self.builder.method

    @property
    def presets(self) -> Mapping[str, Mapping[str, Any]]:
        """Published settings by name."""
        return self.builder.presets

    @property
    def options(self) -> tuple[str, ...]:
        """Names of the options."""
        return tuple(item.name for item in fields(self.builder))

    @property
    def attention_free(self) -> bool:
        """True if the method reads keys, values and positions only."""
        needs = self.builder().needs
        return needs.queries == 0 and not needs.future

    @property
    def needs(self) -> str:
        """What the method reads with its defaults, in words."""
        needs = self.builder().needs
        if needs.future:
            return "future attention"
        if needs.queries == ALL_QUERIES:
            return "every query"
        if needs.queries:
            return "last query" if needs.queries == 1 else f"last {needs.queries} queries"
        return "keys, values, positions"


METHODS: Mapping[str, Entry] = {
    entry.name: entry
    for entry in (
        Entry(builder=Random, line="random tokens, seeded"),
        Entry(builder=StreamingLLM, line="first tokens and the most recent ones"),
        Entry(builder=KNorm, line="keys of low norm"),
        Entry(builder=KeyDiff, line="keys unlike the average key"),
        Entry(builder=LagKV, line="tokens that vary most against the following partition"),
        Entry(builder=SnapKV, line="what the last window of queries attends to, and the window"),
        Entry(builder=TOVA, line="what the last token attends to, same for all heads of a layer"),
        Entry(builder=H2O, line="tokens that received most attention so far, and recent ones"),
        Entry(builder=Oracle, line="what the future will attend to (hindsight, an upper bound)"),
    )
}
"""Roster: method name -> entry."""

_SPEC = re.compile(r"\s*(?P<name>\w+)\s*(?::\s*(?P<preset>\w+)\s*)?(?:\((?P<options>[^()]*)\)\s*)?")


def make_scorer(spec: str, **options: int | str | bool) -> Scorer:
    """Build a scorer from a specification; keyword `options` override those in it.

    Raises UsageError, in one line, on an unknown method, preset or option, or a value that is not
    allowed.
    """
    match = _SPEC.fullmatch(spec)
    if match is None:
        raise UsageError(
            f"method {spec!r} is not of the form name, name:preset or name(option=value)"
        )
    name, preset = match["name"], match["preset"]
    entry = METHODS.get(name)
    if entry is None:
        raise UsageError(f"unknown method {name!r}: choose from {', '.join(METHODS)}")
    if preset and preset not in entry.presets:
        known = ", ".join(entry.presets) or "none"
        raise UsageError(f"{name} has no preset {preset!r}: its presets are {known}")
    settings = dict(entry.presets[preset]) if preset else {}
    settings |= {**_parse_options(name, match["options"] or ""), **options}
    for option in settings:
        if option not in entry.options:
            known = ", ".join(entry.options) or "none"
            raise UsageError(f"{name} has no option {option!r}: its options are {known}")
    return entry.builder(**settings)


def _parse_options(name: str, text: str) -> dict[str, int | str | bool]:
    options: dict[str, int | str | bool] = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        option, equals, value = (piece.strip() for piece in part.partition("="))
        if not equals or not option or not value:
            raise UsageError(f"{name}: {part!r} is not of the form option=value")
        if option in options:
            raise UsageError(f"{name}: option {option!r} is given twice")
        options[option] = _parse_value(value)
    return options


def _parse_value(text: str) -> int | str | bool:
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    return int(text) if re.fullmatch(r"[+-]?\d+", text) else text
