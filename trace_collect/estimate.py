"""Bytes and hours before any work: what a store will hold, and whether the disk has room for it."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

from kvp.errors import StoreError
from kvp.geometry import Geometry
from kvp.store import planned_bytes

_COMPRESSED = {"float32": 0.9, "float16": 0.7, "bfloat16": 0.7}
"""Share of the raw bytes that compression leaves, cautiously; 16-bit traces measured 0.69."""


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """Upper bounds: every prompt as long as allowed, every continuation too."""

    geometry: Geometry
    dtype: str
    sequences: int
    tokens: int
    """Tokens of all sequences."""
    store_queries: bool
    labels: int = 0
    """Labels kept per token."""

    @property
    def key_bytes(self) -> int:
        """Bytes of all keys; the values have as many."""
        both = planned_bytes(
            self.geometry, dtype=self.dtype, tokens=self.tokens, store_queries=False
        )
        return both // 2

    @property
    def query_bytes(self) -> int:
        """Bytes of all queries, 0 in a store without."""
        return self.key_bytes * self.geometry.group * self.store_queries

    @property
    def raw_bytes(self) -> int:
        """Bytes of all tensors and labels before compression."""
        return 2 * self.key_bytes + self.query_bytes + self.label_bytes

    @property
    def label_bytes(self) -> int:
        """Bytes of all labels."""
        return self.tokens * self.geometry.agents * 4 * self.labels

    @property
    def disk_bytes(self) -> int:
        """Bytes expected on disk."""
        return round(self.raw_bytes * _COMPRESSED[self.dtype])

    def lines(self, rate: float | None) -> list[str]:
        """What to tell the user; `rate` in tokens per second, if known."""
        lines = [
            f"{self.sequences} sequences, at most {self.tokens} tokens; {self.geometry}, "
            f"{self.dtype}",
            f"at most {gigabytes(self.raw_bytes)}: queries {gigabytes(self.query_bytes)}, keys "
            f"{gigabytes(self.key_bytes)}, values {gigabytes(self.key_bytes)}"
            + (f", labels {gigabytes(self.label_bytes)}" if self.labels else "")
            + "; about "
            f"{gigabytes(self.disk_bytes)} on disk after lossless compression",
        ]
        if rate is not None:
            lines.append(f"about {duration(self.tokens / rate)} at {rate:.0f} tokens/s")
        return lines


def check_disk(path: Path, needed: int) -> None:
    """Raise StoreError when the disk that `path` will be on has fewer than `needed` bytes left."""
    place = path.absolute()
    while not place.exists():
        place = place.parent
    free = shutil.disk_usage(place).free
    if free < needed:
        raise StoreError(
            f"--out {path}: about {gigabytes(needed)} to write, {gigabytes(free)} free on that disk"
        )


def gigabytes(count: int) -> str:
    """A number of bytes for people, in powers of 1000."""
    for unit, size in (("TB", 10**12), ("GB", 10**9), ("MB", 10**6)):
        if count >= size:
            return f"{count / size:.2f} {unit}"
    return f"{count / 1000:.1f} kB"


def duration(seconds: float) -> str:
    """A time span for people."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    if seconds < 2 * 3600:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h"
