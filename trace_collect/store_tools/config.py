"""Settings of the subcommands of kvp store. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from kvp.config_groups import DeviceConfig, Group
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
class ToImportanceConfig(GridConfig, DeviceConfig, StoreToolConfig):
    """Importance in place of queries."""

    traces: str = field(kw_only=False)
    """Trace store written by kvp-collect. With queries."""
    out: str
    """What is written. A trace store: new, empty, or an interrupted one of the same settings, which
    is continued."""
    allow_incomplete: bool = False
    """Use a store whose collection has not finished."""
