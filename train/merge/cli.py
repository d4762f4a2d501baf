"""Entry point of `kvp-merge`; heavy imports wait until the flags are known to be good."""

from __future__ import annotations

from collections.abc import Sequence

from kvp.cli import main as run_program
from train.merge.config import MergeConfig

EXAMPLES = (
    "kvp-train --traces runs/traces --heads 0:8 --out runs/first",
    "kvp-train --traces runs/traces --heads 8:16 --out runs/second",
    "kvp-merge --shards runs/first,runs/second --out runs/policies",
)


def main(argv: Sequence[str] | None = None) -> int:
    """Parse the command line, merge, and return the exit code (see `kvp.cli.main`)."""
    return run_program(
        MergeConfig,
        _run,
        prog="kvp-merge",
        description=(
            "Join policy directories of some KV heads each, written by kvp-train --heads, to the "
            "policy that one run of all heads would have written."
        ),
        argv=argv,
        examples=EXAMPLES,
    )


def _run(config: MergeConfig) -> None:
    from train.merge.run import run

    run(config)
