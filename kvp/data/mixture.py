"""Several kinds of data in one sequence of prompts: `--data ruler:0.5,chat:0.3,notes.jsonl:0.2`."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from kvp.config_groups import split_list
from kvp.errors import UsageError


@dataclass(frozen=True, kw_only=True)
class Part:
    """One kind of data of a mixture."""

    data: str
    """What `--data` takes alone."""
    weight: float
    """Its share, relative to those of the others."""


def parts_of(data: str) -> tuple[Part, ...]:
    """The parts of a mixture; data without a comma, or that exist under their name, are one part.

    Raises UsageError where a part of several has no weight above 0, or is named twice.
    """
    names = split_list(data)
    if "," not in data or not names or Path(data).exists():
        return (Part(data=data, weight=1.0),)
    parts = tuple(map(_part, names))
    twice = [part.data for part in parts if [each.data for each in parts].count(part.data) > 1]
    if twice:
        raise UsageError(f"--data: {twice[0]} is named twice; add its weights")
    return parts


def turns(weights: Sequence[float]) -> Iterator[int]:
    """Which part is next, without end: always the one furthest behind its share.

    After any number of turns each part has had its share of them, to within one turn for two
    parts and never more than the number of parts. The first of equal parts comes first.
    """
    total, given = math.fsum(weights), [0] * len(weights)
    number = 0
    while True:
        number += 1
        behind = [weight / total * number - had for weight, had in zip(weights, given, strict=True)]
        part = behind.index(max(behind))
        given[part] += 1
        yield part


def _part(text: str) -> Part:
    name, _, share = text.rpartition(":")
    try:
        weight = float(share)
    except ValueError:
        weight = math.nan
    if not name or not 0 < weight < math.inf:
        raise UsageError(
            f"--data: {text} has no weight; a mixture is named as ruler:0.5,chat:0.3,FILE:0.2"
        )
    return Part(data=name, weight=weight)
