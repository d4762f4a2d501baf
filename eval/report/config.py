"""Settings of kvp-report. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True)
class ReportConfig:
    """Settings of one report."""

    results: str = field(kw_only=False)
    """Results folder written by kvp-eval."""
    out: str | None = None
    """HTML file to write (default: report.html in the results folder)."""
    png: str | None = None
    """Folder for the PNG figures (default: figures/ next to the HTML file)."""
    validation: str | None = None
    """Results folder of the same evaluation on other prompts, on which the setting of each method
    (preset, protection) is chosen; without it, the prompts shown decide."""
    bootstrap: int = 2000
    """Resamples behind each interval."""

    def __post_init__(self) -> None:
        """Raise ValueError, naming the flag, on numbers that cannot work."""
        if self.bootstrap < 1:
            raise ValueError(f"--bootstrap must be at least 1, got {self.bootstrap}")
