"""Command line of kvp-tune. Imports no torch, so `--help` answers at once."""

from __future__ import annotations

from collections.abc import Sequence

from eval.tune.config import TuneConfig
from kvp.cli import main as run_program

DESCRIPTION = (
    "Choose options, allocator and protection of every method on validation prompts, with the same "
    "number of settings for each and for every protocol. A grid whose best number is at its end "
    "goes on until that number is enclosed. Writes settings.json, which kvp-eval runs as "
    "`--methods tuned:FOLDER` and kvp-report reads. Interrupted runs resume, finished ones can be "
    "extended by methods, settings or prompts."
)
EXAMPLES = (
    "kvp-tune --methods snapkv,tova,h2o --tasks niah_single_1,niah_multikey_1 --out runs/tuned",
    "kvp-tune --methods kvp,keydiff --policies runs/policies --dry_run --out runs/tuned",
    "kvp-eval --methods full,tuned:runs/tuned --out runs/test",
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run kvp-tune; returns the exit code (0, 2 on a user's error, 130 on Ctrl-C)."""
    return run_program(
        TuneConfig,
        _run,
        prog="kvp-tune",
        description=DESCRIPTION,
        argv=argv,
        examples=EXAMPLES,
    )


def _run(config: TuneConfig) -> None:
    from eval.tune.run import run

    run(config)


if __name__ == "__main__":
    raise SystemExit(main())
