"""Settings of kvp-report. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from kvp.config_groups import MAX_BOOTSTRAP, Group


@dataclass(frozen=True, kw_only=True)
class ReportConfig(Group):
    """Report."""

    results: str | Sequence[str] = field(kw_only=False)
    """Results folder written by kvp-eval. Several are possible: folders of the same settings are
    shown as one run, runs of other models, lengths or seeds side by side."""
    out: str | None = None
    """What is written. An HTML file (default: report.html in the first results folder)."""
    png: str | None = None
    """Folder for the figures as PNG files; without it, they are in the HTML file alone."""
    settings: str | None = None
    """Settings file of kvp-tune, or its folder: the setting of each method. Results of
    `kvp-eval --methods tuned:FILE` have it already. With neither, methods are shown in their
    defaults."""
    bootstrap: int = 2000
    """Resamples behind each interval."""

    ADDRESSES: ClassVar[tuple[str, ...]] = ("results",)
    MINIMUMS: ClassVar[Mapping[str, float]] = {"bootstrap": 1}
    MAXIMUMS: ClassVar[Mapping[str, float]] = {"bootstrap": MAX_BOOTSTRAP}

    @property
    def folders(self) -> tuple[str, ...]:
        """Results folders, at least one."""
        return (self.results,) if isinstance(self.results, str) else tuple(self.results)
