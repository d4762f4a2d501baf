"""What dry runs count with: time spans for people, what compression leaves."""

from __future__ import annotations

COMPRESSED = {"float32": 0.9, "float16": 0.7, "bfloat16": 0.7}
"""Share of the raw bytes that compression leaves, cautiously; 16-bit traces measured 0.69."""


def span(seconds: float) -> str:
    """A time span for people: `40 s`, `12 min`, `3.5 h`."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 2 * 3600 else f"{seconds / 3600:.1f} h"
