"""The phases of the curriculum, read from `phases.toml`."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, kw_only=True)
class Bucket:
    """One kind of batch: `rows` sequences of `length` tokens."""

    length: int
    """Tokens."""
    rows: int
    """Sequences per step."""
    share: float
    """Relative frequency among the buckets of its phase."""
    mix: dict[str, float]
    """Relative frequency of each sequence maker (see `data.py`)."""


@dataclass(frozen=True, kw_only=True)
class Phase:
    """A stretch of training with one mixture and one learning-rate ramp."""

    name: str
    steps: int
    """Optimiser steps."""
    lr: float
    """Peak learning rate."""
    final_lr: float
    """Learning rate at the phase's last step, reached along a cosine."""
    warmup: int
    """Steps of linear warm-up."""
    real_text: float = 1.0
    """Share of essay haystacks taken from the training text; the others are generated prose."""
    brief: float = 0.45
    """Share of the dense recall sequences that ask nothing and list every key."""
    stretch: float = 0.0
    """Share of the sequences whose positions are stretched towards the trained context."""
    buckets: tuple[Bucket, ...]


def read_phases(path: Path) -> list[Phase]:
    """The phases of a TOML file, in the order they run."""
    tables = tomllib.loads(path.read_text(encoding="utf-8"))["phase"]
    return [
        Phase(**{**table, "buckets": tuple(Bucket(**bucket) for bucket in table["buckets"])})
        for table in tables
    ]
