"""Settings of kvp compare. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar

from kvp.config_groups import MAX_BOOTSTRAP, Group


@dataclass(frozen=True, kw_only=True)
class CompareConfig(Group):
    """Compare."""

    first: str = field(kw_only=False)
    """Results folder written by kvp-eval."""
    second: str = field(kw_only=False)
    """Results folder whose numbers are compared with those of the first."""
    out: str | None = None
    """What is written. A CSV file with every number of the tables (default: none)."""
    bootstrap: int = 2000
    """Resamples behind each interval."""
    seed: int = 0
    """Seed of everything that is drawn or generated: the resamples."""

    ADDRESSES: ClassVar[tuple[str, ...]] = ("first", "second")
    MINIMUMS: ClassVar[Mapping[str, float]] = {"bootstrap": 1}
    MAXIMUMS: ClassVar[Mapping[str, float]] = {"bootstrap": MAX_BOOTSTRAP}
