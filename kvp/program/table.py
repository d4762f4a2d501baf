"""How the command `kvp` and the console scripts start a program.

Whatever a program needs is imported when it is started, so that `--help` imports no torch.
Importing this module makes the process find kvp's own packages before a user's of the same names,
also in the processes that it starts.
"""

import os
import sys
import textwrap
from collections.abc import Sequence
from functools import partial

from kvp.errors import UsageError, did_you_mean
from kvp.own_packages import prefer_own_packages
from kvp.program.command_line import parse_arguments
from kvp.program.exit_codes import call_program
from kvp.program.programs import PROGRAMS, SCRIPTS, load
from kvp.version import __version__

prefer_own_packages()
# Threads that wait in a loop take the cores of others: on a busy machine kvp eval took four times
# the processor time. It must be set before torch is imported.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")


def run_program(name: str, argv: Sequence[str] | None = None) -> int:
    """Run one program with its arguments, by default the process's, and return the exit code.

    It is that of `call_program`, whose signals and errors hold from the first import on.
    """
    program, prog = PROGRAMS[name], f"kvp {name}"
    words = sys.argv[1:] if argv is None else argv
    if program.config is None:
        code: int = load(program.run)(words)
        return code

    def run() -> None:
        settings = load(str(program.config))
        config = parse_arguments(
            settings, words, prog=prog, description=program.description, examples=program.examples
        )
        config.check_names()
        load(program.run)(config)

    return call_program(run, prog)


collect, train, evaluate, report = (partial(run_program, name) for name in SCRIPTS)


def main(argv: Sequence[str] | None = None) -> int:
    """Run `kvp PROGRAM ...`; returns the exit code."""
    words = sys.argv[1:] if argv is None else argv
    name = words[0] if words else ""
    if name in PROGRAMS:
        return run_program(name, words[1:])

    def run() -> None:
        if name in ("--help", "-h", "--version"):
            print(f"kvp {__version__}" if name == "--version" else _overview(), flush=True)
            return
        unknown = f"unknown program {name!r}{did_you_mean(name, PROGRAMS)}"
        raise UsageError(f"{unknown if words else 'name a program'}: {', '.join(PROGRAMS)}")

    return call_program(run, "kvp")


def _overview() -> str:
    width = max(map(len, PROGRAMS))
    rows, wrapper = [], textwrap.TextWrapper(100, "  ", " " * (width + 8))
    for name, program in PROGRAMS.items():
        line = program.description.partition(". ")[0].rstrip(".")
        rows += wrapper.wrap(f"kvp {name:<{width}}  {line}")
    return "\n".join(["usage: kvp PROGRAM ... (each has --help)", "", *rows])
