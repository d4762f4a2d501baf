"""Command-line front of every program: dataclass -> flags, YAML + flags, one-line errors.

The one place that knows jsonargparse. Programs call `main` from their `cli.py`, which imports no
torch, so `--help` answers at once.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Sequence
from typing import Any, TypeVar, get_type_hints

from jsonargparse import ArgumentParser, set_parsing_settings

from kvp.errors import KvpError

ConfigT = TypeVar("ConfigT")
_BOOLEANS = ("true", "false", "yes", "no")


def build_parser(
    config_class: type[Any], *, prog: str, description: str, positional: bool = False
) -> ArgumentParser:
    """Parser: one flag per field of a config dataclass, `--config FILE`, `--print_config`.

    With `positional`, fields without a default are arguments instead of flags.
    """
    set_parsing_settings(docstring_parse_attribute_docstrings=True)  # fields' docstrings -> --help
    parser = ArgumentParser(
        prog=prog, description=description, allow_abbrev=False, exit_on_error=True
    )
    parser.add_argument("--config", action="config", help="YAML file with any of these settings")
    parser.add_class_arguments(config_class, as_group=False, as_positional=positional)
    return parser


def main(
    config_class: type[ConfigT],
    run: Callable[[ConfigT], None],
    *,
    prog: str,
    description: str,
    argv: Sequence[str] | None = None,
    positional: bool = False,
) -> int:
    """Parse `argv` into `config_class`, call `run`, and return the exit code.

    0 on success, 2 on a `KvpError` or a `ValueError` of the config (one line on stderr), 130 on
    Ctrl-C.
    """
    parser = build_parser(config_class, prog=prog, description=description, positional=positional)
    namespace = parser.parse_args(spell_out(sys.argv[1:] if argv is None else argv, config_class))
    namespace.pop("config", None)
    try:
        config = config_class(**namespace.as_dict())
    except (ValueError, KvpError) as error:
        return _refuse(prog, error)
    try:
        run(config)
    except KvpError as error:
        return _refuse(prog, error)
    except KeyboardInterrupt:
        print(f"{prog}: interrupted", file=sys.stderr)
        return 130
    return 0


def run_unconfigured(run: Callable[[], None], *, prog: str) -> int:
    """Call `run` and return the exit code: 0, or 2 on a `KvpError` (one line on stderr)."""
    try:
        run()
    except KvpError as error:
        return _refuse(prog, error)
    return 0


def spell_out(argv: Sequence[str], config_class: type[Any]) -> list[str]:
    """Arguments as the parser knows them: `--dry-run` becomes `--dry_run=true`.

    Dashes inside a flag's name stand for underscores, and a yes-or-no flag without a value is a
    yes. Values are left alone.
    """
    switches = {f"--{name}" for name, kind in get_type_hints(config_class).items() if kind is bool}
    result = []
    for position, argument in enumerate(argv):
        flag, equals, value = argument.partition("=")
        if flag.startswith("--"):
            flag = "--" + flag[2:].replace("-", "_")
        following = "".join(argv[position + 1 : position + 2]).lower()
        if flag in switches and not equals and following not in _BOOLEANS:
            equals, value = "=", "true"
        result.append(f"{flag}{equals}{value}")
    return result


def split_list(text: str) -> tuple[str, ...]:
    """Parts of a comma-separated list, stripped, without empties and repeats.

    Commas inside parentheses do not separate: `snapkv(window=16,pool=avg),tova` has two parts.
    """
    parts = (part.strip() for part in re.split(r",(?![^()]*\))", text))
    return tuple(dict.fromkeys(part for part in parts if part))


def _refuse(prog: str, error: Exception) -> int:
    print(f"{prog}: error: {' '.join(str(error).split())}", file=sys.stderr)
    return 2
