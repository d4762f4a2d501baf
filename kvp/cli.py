"""Command-line front of every program: config -> flags, YAML + flags, one-line errors.

Flags come from the config's groups (`kvp.config_groups`); what a program prints when it ends badly,
and its exit code, is decided in `kvp.exit_codes`.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Collection, Sequence
from typing import Any, NoReturn, TypeVar

import yaml

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
    flags = {flag.name: flag for flag in flags_of(config_class, arguments.yaml.get("preset"))}
    shown = set(flags) if arguments.help_all else set(visible_flags(config_class))
    parser = _parser(flags.values(), shown, prog=prog, description=description, examples=examples)
    if arguments.help_all:
        parser.print_help()
        raise SystemExit(0)
    given = vars(parser.parse_args(arguments.spelled))
    given.pop("config", None)  # read already
    print_config = given.pop("print_config", False)
    settings = {flag.name: flag.default for flag in flags.values() if not flag.required}
    for name, value in arguments.yaml.items():
        several = flags[name].several and isinstance(value, list)
        values = [parse_value(flags[name], one) for one in (value if several else [value])]
        settings[name] = values if several else values[0]
    settings |= given
    if print_config:
        print(yaml.safe_dump(settings, sort_keys=False), end="")
        raise SystemExit(0)
    missing = [_spelled(flag) for flag in flags.values() if flag.name not in settings]
    if missing:
        raise UsageError(f"{', '.join(missing)} is missing")
    try:
        return config_class(**settings)
    except ValueError as error:
        raise UsageError(str(error)) from None


def _spelled(flag: Flag) -> str:
    return flag.name.upper() if flag.positional else f"--{flag.name}"


class _Parser(argparse.ArgumentParser):
    """A parser whose errors are `UsageError`."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(message.removeprefix("argument "))


def _parser(
    flags: Collection[Flag],
    shown: set[str],
    *,
    prog: str,
    description: str,
    examples: Sequence[str],
) -> _Parser:
    """Parser of what is given, without defaults; --help leaves out what is not in `shown`."""
    needed = "".join(
        f"{_spelled(flag)} " + ("" if flag.positional else f"{flag.metavar} ")
        for flag in flags
        if flag.required
    )
    end = ["examples:", *(f"  {line}" for line in examples)] if examples else []
    if hidden := len({flag.name for flag in flags} - shown):
        end += ["", f"{hidden} more settings, as flags or in YAML: {prog} --help_all"]
    parser = _Parser(
        prog=prog,
        usage=f"{prog} {needed}[--config FILE] [--FLAG VALUE ...]",
        description=description,
        epilog="\n".join(end),
        allow_abbrev=False,
        argument_default=argparse.SUPPRESS,
        formatter_class=_Help,
    )
    parser.add_argument("--config", metavar="FILE", help="YAML file with any of these settings.")
    parser.add_argument(
        "--print_config", action="store_true", help="Print all settings as YAML and exit."
    )
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
        settings["nargs"] = "*" if flag.several else "?"  # a YAML file may have them
    section.add_argument(flag.name if flag.positional else f"--{flag.name}", **settings)


class _Help(argparse.HelpFormatter):
    """Flags in a column, paragraphs filled, what stands after them as it is written."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=26, width=100)

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        if text.startswith("examples:"):
            return text
        return super()._fill_text(text, width, indent)
