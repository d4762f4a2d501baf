"""Command-line front of every program: config -> flags, YAML + flags, one-line errors.

The only module that uses jsonargparse. Flags come from the config's groups (`kvp.config_groups`);
what a program prints when it ends badly, and its exit code, is decided in `kvp.exit_codes`.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from jsonargparse import ArgumentParser

from kvp import __version__
from kvp.command_line import Arguments, Flag, flags_of, parse_value, visible_flags
from kvp.config_groups import Group
from kvp.errors import UsageError
from kvp.exit_codes import guarded

ConfigT = TypeVar("ConfigT")


def main(
    config_class: type[ConfigT],
    run: Callable[[ConfigT], object],
    *,
    argv: Sequence[str],
    prog: str,
    description: str = "",
    examples: Sequence[str] = (),
) -> int:
    """Parse `argv` into `config_class`, call `run`, and return the exit code (`guarded`).

    `--help`, `--version` and `--print_config` leave by SystemExit(0).
    """

    def program() -> None:
        config = parse(config_class, argv, prog=prog, description=description, examples=examples)
        if isinstance(config, Group):
            config.check_names()
        run(config)

    return guarded(program, prog)


def parse(
    config_class: type[ConfigT],
    argv: Sequence[str],
    *,
    prog: str = "kvp",
    description: str = "",
    examples: Sequence[str] = (),
) -> ConfigT:
    """Config that the arguments describe: defaults, under the preset, under YAML, under flags.

    Raises UsageError, in one line that names the flag or the file, on anything that cannot work.
    """
    arguments = Arguments.read(argv, config_class)
    flags = flags_of(config_class, arguments.preset)
    shown = {flag.name for flag in flags}
    if not arguments.help_all:
        shown &= set(visible_flags(config_class))
    parser = _parser(flags, shown, prog=prog, description=description, examples=examples)
    if arguments.help_all:
        parser.print_help()
        raise SystemExit(0)
    try:
        settings = parser.parse_args(list(arguments.spelled)).as_dict()
    except (argparse.ArgumentError, argparse.ArgumentTypeError) as error:
        raise UsageError(_plain(str(error), flags)) from None
    settings.pop("config", None)
    try:
        return config_class(**settings)
    except ValueError as error:
        raise UsageError(str(error)) from None


def _parser(
    flags: Sequence[Flag],
    shown: set[str],
    *,
    prog: str,
    description: str,
    examples: Sequence[str],
) -> ArgumentParser:
    """Parser: one flag or argument per setting, `--config FILE`, `--print_config`, `--version`.

    --help leaves out the flags that are not in `shown`.
    """
    needed = "".join(
        f"{flag.name.upper()} " if flag.positional else f"--{flag.name} {flag.metavar} "
        for flag in flags
        if flag.required
    )
    end = ["examples:", *(f"  {line}" for line in examples)] if examples else []
    if hidden := len({flag.name for flag in flags} - shown):
        end += ["", f"{hidden} more settings, as flags or in YAML: {prog} --help_all"]
    parser = ArgumentParser(
        prog=prog,
        usage=f"{prog} {needed}[--config FILE] [--FLAG VALUE ...]",
        description=description,
        epilog="\n".join(end),
        allow_abbrev=False,
        exit_on_error=False,
        formatter_class=_Help,
    )
    parser.add_argument("--config", action="config", help="YAML file with any of these settings.")
    parser.add_argument("--version", action="version", version=f"{prog} {__version__}")
    sections: dict[str, Any] = {}
    for flag in flags:
        if flag.section not in sections:
            sections[flag.section] = parser.add_argument_group(flag.section)
        _add(sections[flag.section], flag, shown=flag.name in shown)
    return parser


def _add(section: Any, flag: Flag, *, shown: bool) -> None:  # noqa: ANN401  # has no public type
    def convert(value: object) -> object:
        return parse_value(flag, value)

    convert.__name__ = flag.name
    settings: dict[str, Any] = {
        "type": convert,
        "help": flag.help.replace("%", "%%") if shown else argparse.SUPPRESS,
        "metavar": flag.name.upper() if flag.positional else flag.metavar,
    }
    if flag.positional:
        section.add_argument(flag.name, **settings, **({"nargs": "+"} if flag.several else {}))
    elif flag.required:
        section.add_argument(f"--{flag.name}", required=True, **settings)
    else:
        section.add_argument(f"--{flag.name}", default=flag.default, **settings)


def _plain(message: str, flags: Sequence[Flag]) -> str:
    """One line out of a message of the parser, which puts its own words before ours."""
    if "arguments are required: " in message:
        missing = message.partition("arguments are required: ")[2].split(", ")
        positional = {flag.name for flag in flags if flag.positional}
        names = [name.strip("-") for name in missing]
        shown = [name.upper() if name in positional else f"--{name}" for name in names]
        return ", ".join(shown) + " is missing"
    opening, separator, rest = message.partition(": ")
    if separator and rest.startswith("--") and opening.startswith(("argument ", "Parser key ")):
        return rest
    return message.removeprefix("argument ")


class _Help(argparse.HelpFormatter):
    """Flags in a column, paragraphs filled, what stands after them as it is written."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=26, width=100)

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        if text.startswith("examples:"):
            return text
        return super()._fill_text(text, width, indent)
