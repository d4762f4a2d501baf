"""Command line of kvp-report. Imports no torch, so `--help` answers at once."""

from __future__ import annotations

from collections.abc import Sequence

from eval.report.config import ReportConfig
from kvp.cli import main as run_program

DESCRIPTION = (
    "Turn results folders of kvp-eval into one HTML page that opens without a network, and "
    "figures as PNG."
)
EXAMPLES = (
    "kvp-report runs/results",
    "kvp-report runs/results --out report.html --png figures",
    "kvp-report runs/seed0 runs/seed1 --out both.html",
    "kvp-report runs/test --settings runs/tuned/settings.json",
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run kvp-report; returns the exit code (0, 2 on a user's error, 130 on Ctrl-C)."""
    return run_program(
        ReportConfig,
        _run,
        prog="kvp-report",
        description=DESCRIPTION,
        argv=argv,
        examples=EXAMPLES,
        positional=True,
    )


def _run(config: ReportConfig) -> None:
    from eval.report.run import run

    run(config)


if __name__ == "__main__":
    raise SystemExit(main())
