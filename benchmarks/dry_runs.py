"""What dry runs say beside what the same settings then take, of the bundled model.

    python -m benchmarks.dry_runs --out FILE

Rows: `program`, its estimate `said`, what it `took` and `ratio`, took over said. `kvp collect` says
MB on disk, `kvp eval` seconds on the wall. `took` holds all that a program does after its start.
It takes less than a minute.
"""

from argparse import Namespace
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

from benchmarks.measuring import build_parser, rows_of, timed, write_report
from kvp.artifacts.addresses import files_below
from kvp.program.table import run_program

WORDS = {"collect": "trace_collect.run.decimal", "eval": "eval.run.timedelta"}
"""The function that puts the estimate of each program into words."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Run each program twice, first as a dry run, and write the JSON file."""
    args = build_parser(__doc__, length=512, prompts=8).parse_args(arguments)
    with TemporaryDirectory() as made:
        results, failed = rows_of(WORDS, partial(_compared, args, Path(made)))
    write_report(args, results=results, failed=failed)


def _compared(args: Namespace, made: Path, program: str) -> list[dict[str, Any]]:
    data = f"--tasks niah_single_2 --length {args.length}"
    own = {
        "collect": f"{data} --train {args.prompts} --validation 1 --answers reference",
        "eval": f"{data} --prompts {args.prompts} --policies nano --methods full,kvp "
        "--budgets 10% --protection off --timing_prompts 0",
    }[program]
    flags = [*own.split(), "--device", args.device, "--out", f"{made / program}"]
    with patch(WORDS[program], side_effect=lambda *said, **_: f"{said}") as worded:
        if code := run_program(program, [*flags, "--dry_run"]):
            raise RuntimeError(f"kvp {program} --dry_run ended with {code}")
    (said,) = (*worded.call_args.args, *worded.call_args.kwargs.values())
    code, seconds = timed(lambda: run_program(program, flags), args.device)
    if code:
        raise RuntimeError(f"kvp-{program} ended with {code}")
    took, unit = seconds.wall, "MB" if program == "collect" else "seconds"
    if unit == "MB":
        said, took = said / 1e6, sum(size for _, size in files_below(made / program)) / 1e6
    row = {"program": f"kvp-{program}", "unit": unit, "said": said, "took": took}
    return [row | {"ratio": took / said}]


if __name__ == "__main__":
    main()
