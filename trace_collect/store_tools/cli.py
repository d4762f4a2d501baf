"""Command line of kvp-store. Imports no torch, so `--help` answers at once."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from kvp import __version__
from kvp.cli import main as run_program
from kvp.cli import run_unconfigured
from kvp.errors import UsageError
from trace_collect.store_tools.config import (
    InspectConfig,
    ToImportanceConfig,
    VerifyConfig,
)

EXAMPLES = (
    "kvp-store inspect runs/traces",
    "kvp-store inspect runs/traces --json",
    "kvp-store verify runs/traces",
    "kvp-store to-importance runs/traces --out runs/lean",
)


@dataclass(frozen=True)
class Command:
    """A subcommand."""

    config: type[Any]
    run: Callable[[Any], None]
    description: str


def main(argv: Sequence[str] | None = None) -> int:
    """Run kvp-store; returns the exit code (0, 2 on a user's error, 130 on Ctrl-C)."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    name = arguments[0] if arguments else ""
    if name in ("--help", "-h"):
        print(_overview())
        return 0
    if name == "--version":
        print(f"kvp-store {__version__}")
        return 0
    if name not in COMMANDS:
        return run_unconfigured(lambda: _unknown(name), prog="kvp-store")
    command = COMMANDS[name]
    return run_program(
        command.config,
        command.run,
        prog=f"kvp-store {name}",
        description=command.description,
        argv=arguments[1:],
        positional=True,
        examples=[line for line in EXAMPLES if line.split()[1] == name],
    )


def _overview() -> str:
    width = max(map(len, COMMANDS))
    rows = (f"  {name:<{width}}  {command.description}" for name, command in COMMANDS.items())
    examples = (f"  {line}" for line in EXAMPLES)
    return "\n".join(
        ["usage: kvp-store COMMAND TRACES ... (each has --help)", "", *rows, "", "examples:",
         *examples]
    )  # fmt: skip


def _unknown(name: str) -> None:
    found = f"unknown command {name!r}" if name else "name a command"
    raise UsageError(f"{found}: {', '.join(COMMANDS)}")


def _inspect(config: InspectConfig) -> None:
    from trace_collect.store_tools.inspection import run

    run(config)


def _verify(config: VerifyConfig) -> None:
    from trace_collect.store_tools.verification import run

    run(config)


def _to_importance(config: ToImportanceConfig) -> None:
    from trace_collect.store_tools.to_importance import run

    run(config)


COMMANDS = {
    "inspect": Command(InspectConfig, _inspect, "Say what a trace store holds, on one screen."),
    "verify": Command(
        VerifyConfig, _verify, "Read every byte of a trace store and name what is damaged."
    ),
    "to-importance": Command(
        ToImportanceConfig,
        _to_importance,
        "Write a trace store anew with an importance grid in place of its queries, as kvp-collect "
        "--store importance would have written it.",
    ),
}
"""Subcommands by name."""


if __name__ == "__main__":
    raise SystemExit(main())
