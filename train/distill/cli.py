"""Entry point of `kvp-distill`; heavy imports wait until the flags are known to be good."""

from __future__ import annotations

from collections.abc import Sequence

from kvp.cli import main as run_program
from train.distill.config import DistillConfig

EXAMPLES = (
    "kvp-distill --policy runs/policies --traces runs/traces --out runs/distilled",
    "kvp-distill --policy runs/policies --traces runs/traces --out runs/distilled "
    "--dtype bfloat16 --device cuda",
)


def main(argv: Sequence[str] | None = None) -> int:
    """Parse the command line, fine-tune, and return the exit code (see `kvp.cli.main`)."""
    return run_program(
        DistillConfig,
        _run,
        prog="kvp-distill",
        description=(
            "Fine-tune a trained policy end to end: the model runs over the replies of traces "
            "behind a softly evicted cache, and the policy learns what makes these replies likely, "
            "or what changes the model's predictions least. Heads that compete for one budget gain "
            "most."
        ),
        argv=argv,
        examples=EXAMPLES,
    )


def _run(config: DistillConfig) -> None:
    from train.distill.run import run

    run(config)
