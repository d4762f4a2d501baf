"""Settings of `kvp-merge`; no torch here, so that `--help` answers at once."""

from __future__ import annotations

from dataclasses import dataclass

from kvp.cli import split_list


@dataclass(frozen=True, kw_only=True)
class MergeConfig:
    """Join the shards of one policy."""

    shards: str
    """Policy directories written by kvp-train --heads, comma separated, in any order."""
    out: str
    """Policy directory to write."""

    def __post_init__(self) -> None:
        """Raise ValueError naming the flag that cannot work."""
        if not self.folders:
            raise ValueError("--shards names no directories")

    @property
    def folders(self) -> tuple[str, ...]:
        """The directories, one by one."""
        return split_list(self.shards)
