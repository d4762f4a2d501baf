"""Entry point of `kvp-calibrate`; heavy imports wait until the flags are known to be good."""

from __future__ import annotations

from collections.abc import Sequence

from kvp.cli import main as run_program
from train.calibration.config import CalibrateConfig

EXAMPLES = (
    "kvp-calibrate --policy runs/policies --traces runs/traces",
    "kvp-calibrate --policy runs/policies --traces runs/traces --calibration share",
    "kvp-calibrate --policy runs/policies --traces runs/traces --calibration none",
)


def main(argv: Sequence[str] | None = None) -> int:
    """Parse the command line, calibrate, and return the exit code (see `kvp.cli.main`)."""
    return run_program(
        CalibrateConfig,
        _run,
        prog="kvp-calibrate",
        description=(
            "Calibrate a policy directory on the validation sequences of a trace store, in place: "
            "its weights and each head's ranking stay, the scores of its heads become comparable."
        ),
        argv=argv,
        examples=EXAMPLES,
    )


def _run(config: CalibrateConfig) -> None:
    from train.calibration.run import run

    run(config)
