"""Settings of an importance grid, which kvp-collect and kvp store share. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

from kvp.config_groups import Group, split_list

GRID_LABELS = ("future_attention", "max_future_attention", "max_reply_attention")
"""As `kvp.store.GRIDS`, without torch."""


@dataclass(frozen=True, kw_only=True)
class GridConfig(Group):
    """Importance grid."""

    grid: int = 48
    """Points of the importance grid of each sequence, both compression boundaries among them."""
    grid_labels: str = "max_reply_attention"
    """Labels that can be trained on the grid, comma separated, some of future_attention,
    max_future_attention and max_reply_attention, the default of kvp-train. Each takes its bytes;
    the grid holds the others at four points, for evaluation and calibration."""
    grid_dtype: Literal["float16", "float32"] = "float16"
    """Dtype of the grid; float16 keeps it to 1e-3 of each value."""

    MINIMUMS: ClassVar[Mapping[str, float]] = {"grid": 2}

    def __post_init__(self) -> None:
        """Raise ValueError, naming the flag, on labels that no grid holds."""
        super().__post_init__()
        named = split_list(self.grid_labels)
        for label in named or ("",):
            if label not in GRID_LABELS:
                raise ValueError(
                    f"--grid_labels: no label {label!r}; use some of {', '.join(GRID_LABELS)}"
                )

    @property
    def grid_label_list(self) -> tuple[str, ...]:
        """Labels that the grid holds at all of its points, in the order of `GRID_LABELS`."""
        named = split_list(self.grid_labels)
        return tuple(label for label in GRID_LABELS if label in named)
