"""Settings of `kvp-calibrate`; no torch here, so that `--help` answers at once."""

from __future__ import annotations

from dataclasses import dataclass

from train.recipe import CalibrationName


@dataclass(frozen=True, kw_only=True)
class CalibrateConfig:
    """Replace the calibration of a policy directory."""

    policy: str
    """Policy directory written by kvp-train."""
    traces: str
    """Trace store of the policy's model, with validation sequences, and with queries or
    an importance grid."""
    calibration: CalibrationName = "contribution"
    """What scores are calibrated to (docs/method.md); none removes the calibration."""
    contexts: int = 128
    """Held-out contexts the calibration is fitted on."""
    device: str = "cpu"
    """cpu, cuda or cuda:INDEX."""
    memory_gb: float = 4.0
    """RAM for traces and for labels, GB in all."""
    allow_incomplete: bool = False
    """Use a store whose collection has not finished."""

    def __post_init__(self) -> None:
        """Raise ValueError naming the flag that cannot work."""
        if self.contexts < 1:
            raise ValueError(f"--contexts must be at least 1, got {self.contexts}")
        if self.memory_gb <= 0:
            raise ValueError(f"--memory_gb must be positive, got {self.memory_gb}")
