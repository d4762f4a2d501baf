"""Command line of kvp-evolve. Imports no torch, so `--help` answers at once."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from eval.evolve.config import EvolveConfig
from kvp.cli import main as run_program

DESCRIPTION = (
    "Choose budgets per layer by evolution on a task of kvp-eval (EvolKV), or per layer or head "
    "from the cost curves of a results folder (--cost_curves, no model). Writes budgets.json, "
    "which any method uses as allocator `evolved:FILE`. Interrupted searches resume."
)
EXAMPLES = (
    "kvp-evolve --scorer snapkv --tasks niah_multikey_1 --budget 12.5% --out runs/budgets",
    "kvp-evolve --cost_curves runs/results --scorer keydiff --out runs/budgets",
    "kvp-eval --methods snapkv,snapkv+evolved:runs/budgets --out runs/results",
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run kvp-evolve; returns the exit code (0, 2 on a user's error, 130 on Ctrl-C)."""
    arguments = [_spelled(word) for word in (sys.argv[1:] if argv is None else argv)]
    return run_program(
        EvolveConfig,
        _run,
        prog="kvp-evolve",
        description=DESCRIPTION,
        argv=arguments,
        examples=EXAMPLES,
    )


def _spelled(argument: str) -> str:
    """`--lambda` as the setting is called: `lambda` is a keyword of Python."""
    flag, equals, value = argument.partition("=")
    return f"--lambda_{equals}{value}" if flag == "--lambda" else argument


def _run(config: EvolveConfig) -> None:
    if config.cost_curves is not None:
        from eval.evolve.from_cost_curves import run_curves

        run_curves(config)
        return
    from eval.evolve.run import run_search

    run_search(config)


if __name__ == "__main__":
    raise SystemExit(main())
