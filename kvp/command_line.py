"""The command line of a program: config -> flags, YAML + flags -> config, one-line errors.

Flags come from the config's groups (`kvp.config_groups`): their help is the docstring of a field,
their type its annotation. Misspelt names are corrected before anything of the program is imported.
"""

from __future__ import annotations

import argparse
import ast
import difflib
import functools
import inspect
import math
import os
import textwrap
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields
from types import NoneType, UnionType
from typing import (
    TYPE_CHECKING,
    Any,
    Literal,
    NoReturn,
    Self,
    TypeVar,
    Union,
    get_args,
    get_origin,
    get_type_hints,
)

import yaml

from kvp import __version__
from kvp.errors import UsageError, guarded

if TYPE_CHECKING:
    from kvp.config_groups import Group

ConfigT = TypeVar("ConfigT", bound="Group")

_PARSER_FLAGS = ("config", "print_config", "help", "help_all", "version")
_YES = ("true", "yes", "on")
_NO = ("false", "no", "off")


@dataclass(frozen=True)
class Flag:
    """One setting as the command line shows it."""

    name: str
    kind: type
    """bool, int, float or str."""
    choices: tuple[str, ...]
    """Allowed values; empty for any."""
    optional: bool
    """Whether None (`null` in YAML) is a value."""
    several: bool
    """Whether a sequence is a value, too."""
    required: bool
    positional: bool
    """Whether it is an argument without a flag: fields that are not keyword-only are."""
    default: Any
    """Value without the flag, with the chosen preset."""
    section: str
    """Title in --help."""
    help: str
    """Docstring of the field and the default."""

    @property
    def metavar(self) -> str:
        """Placeholder of the value in --help."""
        if self.choices:
            return "{" + ",".join(self.choices) + "}"
        return {bool: "true|false", int: "N", float: "X"}.get(self.kind, "TEXT")


def flags_of(config_class: type[Any], preset: str | None = None) -> list[Flag]:
    """Flags of a config: its own first, then those of each group it inherits.

    Groups of one title follow one another, the most general first. A config with presets has
    `PRESETS`: name -> the values it gives, the first one the default.
    """
    presets: Mapping[str, Mapping[str, Any]] = getattr(config_class, "PRESETS", {})
    chosen = presets.get(preset or "", next(iter(presets.values()), {}))
    hints = get_type_hints(config_class)
    result = []
    for owner, name in _declared(config_class):
        one = next(field for field in fields(config_class) if field.name == name)
        default = chosen.get(name, one.default)
        required = default is MISSING
        kind, choices, none = _kind_of(hints[name])
        text = _documentation(owner)[name]  # type: ignore[arg-type]  # a class is hashable
        values = {label: given[name] for label, given in presets.items() if name in given}
        shown = _default(default, required=required, values=values)
        several = any(get_origin(part) is Sequence for part in get_args(hints[name]))
        result.append(
            Flag(
                name,
                kind,
                choices,
                none,
                several,
                required,
                not one.kw_only,
                default,
                _title(owner),
                f"{text}{shown}",
            )
        )
    return result


def visible_flags(config_class: type[Any]) -> tuple[str, ...]:
    """Settings that --help shows: `VISIBLE` of the config, or all of them."""
    names: tuple[str, ...] = getattr(config_class, "VISIBLE", ())
    return names or tuple(field.name for field in fields(config_class))


def parse_value(flag: Flag, value: object) -> object:
    """Value of a flag from text of the command line or a scalar of YAML.

    Raises UsageError in one line that names the values the flag takes.
    """
    if value is None or (flag.optional and value in ("null", "none", "None")):
        if flag.optional:
            return None
        raise UsageError(f"--{flag.name} needs a value")
    if flag.choices:
        text = {True: "on", False: "off"}[value] if isinstance(value, bool) else str(value)
        if text in flag.choices:
            return text
        hint = suggestion(text, flag.choices)
        raise UsageError(f"--{flag.name} must be {_any_of(flag.choices)}, got {value!r}{hint}")
    if flag.kind is bool:
        return _boolean(flag, value)
    if flag.kind in (int, float):
        return _number(flag, value)
    if not isinstance(value, str):
        raise UsageError(f"--{flag.name} must be text; in YAML put it in quotes, got {value!r}")
    return value


def python_value(flag: Flag, value: object) -> object:
    """Value of a flag from a Python caller, who may also give paths, lists and bare numbers.

    A list of names becomes what the flag has, and a mapping `NAME=VALUE,...`; a list that holds
    objects stays a list. Raises UsageError as `parse_value`, and on an object where only a name can
    stand.
    """
    if isinstance(value, os.PathLike):
        value = os.fspath(value)
    if isinstance(value, Mapping):
        value = [f"{name}={one}" for name, one in value.items()]
    if isinstance(value, list | tuple):
        names = [str(one) for one in value if isinstance(one, str | int | float)]
        return ",".join(names) if len(names) == len(value) else tuple(value)
    if value is not None and not isinstance(value, str | int | float):
        shown = textwrap.shorten(repr(value), width=60, placeholder="...")
        raise UsageError(
            f"{flag.name}={shown} is an object; give its name, 'package.module:NAME', or a path"
        )
    if flag.kind is str and not flag.choices and isinstance(value, int | float):
        value = str(value)
    return parse_value(flag, value)


@dataclass(frozen=True)
class Arguments:
    """Arguments in the parser's spelling, checked for names that it does not know."""

    spelled: tuple[str, ...]
    """Flags with underscores; a yes-or-no flag without a value as `--flag=true`."""
    yaml: Mapping[str, Any]
    """Settings of the YAML files, the last file's first; `preset` is that of the flags, if any."""
    help_all: bool
    """Whether all flags are asked for, instead of those that --help shows."""

    @classmethod
    def read(cls, argv: Sequence[str], config_class: type[Any]) -> Self:
        """Read `argv`; UsageError on unknown flags and on YAML that cannot be used."""
        known = [field.name for field in fields(config_class)]
        hints = get_type_hints(config_class)
        settings: dict[str, Any] = {}
        preset: dict[str, str] = {}
        help_all = False
        spelled = []
        for position, argument in enumerate(argv):
            following = next(iter(argv[position + 1 : position + 2]), "")
            if not argument.startswith("--"):
                spelled.append(argument)
                continue
            name, equals, value = argument[2:].partition("=")
            name = name.replace("-", "_")
            name += "_" * (f"{name}_" in known)  # `lambda` is a keyword of Python
            if name not in (*known, *_PARSER_FLAGS):
                hint = suggestion(name, [*known, *_PARSER_FLAGS], "--")
                raise UsageError(f"unknown flag --{name}{hint} (--help_all lists all)")
            help_all |= name == "help_all"
            given = value if equals else following
            if name == "config":
                settings |= _yaml(given, known)
            elif name == "preset":
                preset["preset"] = given
            if hints.get(name) is bool and not equals and following.lower() not in (*_YES, *_NO):
                equals, value = "=", "true"
            spelled.append(f"--{name}{equals}{value}")
        return cls(tuple(spelled), settings | preset, help_all)


def suggestion(name: str, known: Sequence[str], prefix: str = "") -> str:
    """`; did you mean NAME?` where a known name is near, or nothing."""
    near = difflib.get_close_matches(name, known, n=1)
    return f"; did you mean {prefix}{near[0]}?" if near else ""


def _yaml(path: str, known: Sequence[str]) -> dict[str, Any]:
    """Settings of a YAML file; UsageError where it is none or names an unknown setting."""
    try:
        with open(path, encoding="utf-8") as file:
            settings = yaml.safe_load(file)
    except OSError as error:
        raise UsageError(f"--config {path}: {error.strerror}") from None
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError) as error:
        reason = " ".join(str(error).split())
        raise UsageError(f"--config {path} is no YAML file: {reason}") from None
    if not isinstance(settings, dict):
        raise UsageError(f"--config {path} must hold `name: value` lines")
    for name in settings:
        if name not in known:
            hint = suggestion(str(name), known)
            raise UsageError(f"--config {path}: unknown setting {name!r}{hint}")
    return settings


def _declared(config_class: type[Any]) -> Iterator[tuple[type[Any], str]]:
    """Each field and the class that documents it, in the order of --help."""
    owners: dict[str, type[Any]] = {}
    for klass in config_class.__mro__:
        owner = vars(klass).get("DECLARED_IN", klass)
        for name in _documentation(owner):
            owners.setdefault(name, owner)
    order = [vars(klass).get("DECLARED_IN", klass) for klass in config_class.__mro__]
    titles = [_title(owner) for owner in order]
    order = sorted(reversed(order), key=lambda owner: titles.index(_title(owner)))
    names = {field.name for field in fields(config_class)}
    for owner in order:
        for name in _documentation(owner):
            if name in names and owners[name] is owner:
                yield owner, name
    undocumented = names - set(owners)
    if undocumented:
        raise TypeError(f"{config_class.__name__}: {sorted(undocumented)} have no docstring")


def _title(owner: type[Any]) -> str:
    """First line of a docstring, without its full stop."""
    return (owner.__doc__ or "").strip().partition("\n")[0].rstrip(".")


@functools.cache
def _documentation(owner: type) -> dict[str, str]:
    """Docstrings under the fields that a class itself declares."""
    try:
        (node,) = ast.parse(textwrap.dedent(inspect.getsource(owner))).body
    except (OSError, TypeError):  # a builtin
        return {}
    assert isinstance(node, ast.ClassDef)
    result = {}
    for statement, following in zip(node.body, node.body[1:], strict=False):
        if isinstance(statement, ast.AnnAssign) and isinstance(following, ast.Expr):
            assert isinstance(statement.target, ast.Name)
            if "ClassVar" in ast.unparse(statement.annotation):
                continue
            assert isinstance(following.value, ast.Constant)
            result[statement.target.id] = " ".join(str(following.value.value).split())
    return result


def _kind_of(hint: object) -> tuple[type, tuple[str, ...], bool]:
    """Scalar type, choices and whether None is allowed."""
    if get_origin(hint) in (Union, UnionType):
        parts = get_args(hint)
        # A sequence is what a Python caller may give in place of text.
        (inner,) = [p for p in parts if p is not NoneType and get_origin(p) is not Sequence]
        kind, choices, _ = _kind_of(inner)
        return kind, choices, NoneType in parts
    if get_origin(hint) is Literal:
        return str, get_args(hint), False
    assert isinstance(hint, type)
    return hint, (), False


def _default(default: object, *, required: bool, values: Mapping[str, Any]) -> str:
    """The default for --help, and what other presets have."""
    if required:
        return " (required)"
    if default is None or default == "":
        return ""
    others = [f"{name}: {_shown(value)}" for name, value in values.items() if value != default]
    return f" (default: {_shown(default)}{'; ' + ', '.join(others) if others else ''})"


def _shown(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _any_of(choices: Sequence[str]) -> str:
    return choices[0] if len(choices) == 1 else f"{', '.join(choices[:-1])} or {choices[-1]}"


def _boolean(flag: Flag, value: object) -> bool:
    text = str(value).lower()
    if text not in (*_YES, *_NO):
        raise UsageError(f"--{flag.name} must be true or false, got {value!r}")
    return text in _YES


def _number(flag: Flag, value: object) -> int | float:
    what = "a whole number" if flag.kind is int else "a number"
    wrong = UsageError(f"--{flag.name} must be {what}, got {value!r}")
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise wrong
    try:
        number = flag.kind(value)
    except (ValueError, OverflowError):
        raise wrong from None
    if not math.isfinite(number) or (flag.kind is int and isinstance(value, float)):
        raise wrong
    result: int | float = number
    return result


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
