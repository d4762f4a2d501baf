"""Entry point of `kvp-train`; heavy imports wait until the flags are known to be good."""

from __future__ import annotations

from collections.abc import Sequence

from kvp.cli import main as run_program
from train.config import TrainConfig
from train.recipe import PRESETS


def main(argv: Sequence[str] | None = None) -> int:
    """Parse the command line, train, and return the exit code (see `kvp.cli.main`)."""
    return run_program(
        TrainConfig,
        _run,
        prog="kvp-train",
        description=_description(),
        argv=argv,
    )


def _description() -> str:
    presets = "; ".join(
        f"{name}: " + ", ".join(f"{key} {value}" for key, value in recipe.to_dict().items())
        for name, recipe in PRESETS.items()
    )
    return (
        "Train one eviction ranker per KV head, on a trace store or (--source model) on what a "
        "running model shows, and write a policy directory. "
        "The command that was interrupted continues where it was. Settings without a value come "
        f"from the preset. {presets}."
    )


def _run(config: TrainConfig) -> None:
    from train.run import run

    run(config)
