"""Entry point of `kvp-train`; heavy imports wait until the flags are known to be good."""

from __future__ import annotations

from collections.abc import Sequence

from kvp.cli import main as run_program
from train.config import TrainConfig

DESCRIPTION = (
    "Train one eviction ranker per KV head, on a trace store or (--source model) on what a running "
    "model shows, and write a policy directory. An interrupted command continues where it was. "
    "Settings of ranker, objective, optimizer and contexts come from --preset; --print_config "
    "prints all of them."
)
EXAMPLES = (
    "kvp-train --traces runs/traces --out runs/policies",
    "kvp-train --config configs/train_quick.yaml --traces runs/traces --out runs/policies",
    "kvp-train --source model --model Qwen/Qwen2.5-7B-Instruct --length 4096 --dtype bfloat16 "
    "--device cuda --out policies/qwen",
)


def main(argv: Sequence[str] | None = None) -> int:
    """Parse the command line, train, and return the exit code (see `kvp.cli.main`)."""
    return run_program(
        TrainConfig,
        _run,
        prog="kvp-train",
        description=DESCRIPTION,
        argv=argv,
        examples=EXAMPLES,
    )


def _run(config: TrainConfig) -> None:
    from train.run import run

    run(config)


if __name__ == "__main__":
    raise SystemExit(main())
