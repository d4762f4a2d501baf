"""Settings of `kvp report`; no torch here."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar

from eval.results.record_names import NO_RESULTS
from kvp.program.settings import Group, PathOrAddress


@dataclass(frozen=True, kw_only=True)
class ReportConfig(Group):
    """Report."""

    results: PathOrAddress = field(kw_only=False)
    """Results folder written by kvp eval."""
    out: str | None = None
    """What is written. An HTML file (default: report.html in the results folder)."""
    png: str | None = None
    """Folder for the figures as PNG files; without it, they are in the HTML file alone."""

    FOLDERS: ClassVar[Mapping[str, str]] = {"results": NO_RESULTS}
