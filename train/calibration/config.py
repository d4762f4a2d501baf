"""Settings of `kvp calibrate`; no torch here, so that `--help` answers at once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from kvp.config_groups import DeviceConfig, Group, MemoryConfig
from train.recipe import CalibrationName


@dataclass(frozen=True, kw_only=True)
class CalibrationConfig(Group):
    """Calibration."""

    calibration: CalibrationName = "auto"
    """What scores are calibrated to on validation contexts (docs/method.md), so that heads can
    compete; auto is reply_contribution for rankers trained on max_reply_attention, else
    contribution. kvp calibrate changes it later, and removes it where this is none."""
    calibration_contexts: int = 48
    """Held-out contexts the calibration is fitted on."""

    MINIMUMS: ClassVar[Mapping[str, float]] = {"calibration_contexts": 1}


def calibration_target(calibration: CalibrationName, label: str) -> CalibrationName:
    """What rankers trained on `label` are calibrated to: `calibration`, where it is not auto."""
    if calibration != "auto":
        return calibration
    return "reply_contribution" if label == "max_reply_attention" else "contribution"


@dataclass(frozen=True, kw_only=True)
class CalibrateConfig(CalibrationConfig, MemoryConfig, DeviceConfig):
    """Policy and traces."""

    policy: str
    """Policy directory written by kvp-train or kvp distill."""
    traces: str
    """Trace store written by kvp-collect. Of the policy's model, with validation sequences, and
    with queries."""
    allow_incomplete: bool = False
    """Use a store whose collection has not finished."""

    ADDRESSES: ClassVar[tuple[str, ...]] = ("traces",)

    def __post_init__(self) -> None:
        """Raise ValueError naming the flag that cannot work."""
        super().__post_init__()
        if not self.memory_gb > 0:
            raise ValueError(f"--memory_gb must be positive, got {self.memory_gb}")
