"""Settings of `kvp merge`; no torch here, so that `--help` answers at once."""

from __future__ import annotations

from dataclasses import dataclass

from kvp.config_groups import Group, split_list


@dataclass(frozen=True, kw_only=True)
class MergeConfig(Group):
    """Shards."""

    shards: str
    """Policy directories written by kvp-train --heads, comma separated, in any order, or the folder
    that --heads auto has written them into."""
    out: str
    """What is written. A policy directory."""

    def __post_init__(self) -> None:
        """Raise ValueError naming the flag that cannot work."""
        super().__post_init__()
        if not self.folders:
            raise ValueError("--shards names no directories")

    @property
    def folders(self) -> tuple[str, ...]:
        """The directories, one by one."""
        return split_list(self.shards)
