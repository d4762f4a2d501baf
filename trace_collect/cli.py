"""Command line of kvp-collect. Imports no torch, so `--help` answers at once."""

from __future__ import annotations

from collections.abc import Sequence

from kvp.cli import main as run_program
from trace_collect.config import CollectConfig

DESCRIPTION = (
    "Run a model over prompts and store the queries, keys and values its attention saw (a trace "
    "store, the input of kvp-train). Says how many bytes it will write before it does; repeating "
    "an interrupted command continues it."
)
EXAMPLES = (
    "kvp-collect --out runs/traces",
    "kvp-collect --model Qwen/Qwen2.5-7B-Instruct --length 4096 --out traces/qwen --dry-run",
    "kvp-collect --model FOLDER --data my_prompts.jsonl --answers reference --out traces/mine",
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run kvp-collect; returns the exit code (0, 2 on a user's error, 130 on Ctrl-C)."""
    return run_program(
        CollectConfig,
        _run,
        prog="kvp-collect",
        description=DESCRIPTION,
        argv=argv,
        examples=EXAMPLES,
    )


def _run(config: CollectConfig) -> None:
    from trace_collect.run import run

    run(config)


if __name__ == "__main__":
    raise SystemExit(main())
