"""Settings of the subcommands of kvp store. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from kvp.config_groups import DeviceConfig, Group, split_list
from trace_collect.grid_config import GridConfig

SPLITS = ("train", "validation", "test")


@dataclass(frozen=True, kw_only=True)
class StoreToolConfig(Group):
    """Stores, in folders or at addresses."""

    ADDRESSES: ClassVar[tuple[str, ...]] = ("traces", "out")


@dataclass(frozen=True, kw_only=True)
class InspectConfig(StoreToolConfig):
    """Inspect."""

    traces: str = field(kw_only=False)
    """Trace store written by kvp-collect."""
    json: bool = False
    """Print one JSON object instead of text."""


@dataclass(frozen=True, kw_only=True)
class VerifyConfig(StoreToolConfig):
    """Verify."""

    traces: str = field(kw_only=False)
    """Trace store written by kvp-collect."""
    allow_incomplete: bool = False
    """Use a store whose collection has not finished."""


@dataclass(frozen=True, kw_only=True)
class MergeStoresConfig(StoreToolConfig):
    """Merge."""

    traces: str | Sequence[str] = field(kw_only=False)
    """Trace store written by kvp-collect. Two or more, of one model and the same settings; the
    sequences of the first come first."""
    out: str
    """What is written. A trace store: new, empty, or an interrupted one of the same command, which
    is continued."""
    allow_incomplete: bool = False
    """Use a store whose collection has not finished."""

    def __post_init__(self) -> None:
        """Raise ValueError unless there are two stores, each named once."""
        super().__post_init__()
        if len(self.stores) < 2:
            raise ValueError("TRACES: name two stores or more to join")
        if len(set(self.stores)) < len(self.stores):
            raise ValueError("TRACES names a store twice")

    @property
    def stores(self) -> tuple[str, ...]:
        """The stores, in order."""
        return (self.traces,) if isinstance(self.traces, str) else tuple(self.traces)


@dataclass(frozen=True, kw_only=True)
class SubsetConfig(StoreToolConfig):
    """Subset."""

    traces: str = field(kw_only=False)
    """Trace store written by kvp-collect."""
    out: str
    """What is written. A trace store: new, empty, or an interrupted one of the same command, which
    is continued."""
    indices: str | None = None
    """Sequences to take by their index in the store, such as `3,5-9`; all by default."""
    train: int | None = None
    """Sequences of the train split. The first ones of those taken; all by default."""
    validation: int | None = None
    """Sequences of the validation split, which training is validated on. As for train."""
    test: int | None = None
    """Sequences of the test split. As for train."""
    allow_incomplete: bool = False
    """Use a store whose collection has not finished."""

    MINIMUMS: ClassVar[Mapping[str, float]] = {"train": 0, "validation": 0, "test": 0}

    def __post_init__(self) -> None:
        """Raise ValueError, naming the flag, on indices that are none."""
        super().__post_init__()
        _ = self.index_set

    @property
    def index_set(self) -> frozenset[int] | None:
        """The indices to take; None for all."""
        return None if self.indices is None else parse_indices(self.indices)

    @property
    def counts(self) -> dict[str, int | None]:
        """Sequences to take of each split, None for all."""
        return {split: getattr(self, split) for split in SPLITS}


@dataclass(frozen=True, kw_only=True)
class ToImportanceConfig(GridConfig, DeviceConfig, StoreToolConfig):
    """Importance in place of queries."""

    traces: str = field(kw_only=False)
    """Trace store written by kvp-collect. With queries."""
    out: str
    """What is written. A trace store: new, empty, or an interrupted one of the same settings, which
    is continued."""
    allow_incomplete: bool = False
    """Use a store whose collection has not finished."""


def parse_indices(text: str) -> frozenset[int]:
    """Numbers and ranges with both ends, `3,5-9`; ValueError, naming --indices, on others."""
    found: set[int] = set()
    for part in split_list(text):
        first, dash, last = part.partition("-")
        if not (first.isdecimal() and (last.isdecimal() if dash else True)):
            raise ValueError(f"--indices: {part!r} is neither an index nor a range such as 5-9")
        if dash and int(last) < int(first):
            raise ValueError(f"--indices: {part} ends before it begins")
        found.update(range(int(first), int(last if dash else first) + 1))
    if not found:
        raise ValueError("--indices names no sequence")
    return frozenset(found)
