"""The command line of a program: config -> flags, YAML + flags -> config, one-line errors.

Flags come from the config's groups (`kvp.program.settings`): their help is a field's docstring,
their type its annotation. Misspelt names are corrected before anything of the program is imported.
"""

from __future__ import annotations

import ast
import functools
import inspect
import itertools
import math
import os
import re
import reprlib
import sys
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import MISSING, dataclass, fields
from types import NoneType, UnionType
from typing import TYPE_CHECKING, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from kvp.artifacts.addresses import regular
from kvp.errors import UsageError, call_program
from kvp.plugins import did_you_mean
from kvp.version import __version__

if TYPE_CHECKING:
    from kvp.program.settings import Group

ConfigT = TypeVar("ConfigT", bound="Group")

_SWITCHES = ("print_config", "help", "help_all", "version")
_YES = ("true", "yes", "on")
_NO = ("false", "no", "off")
_NO_NAME = re.compile("[\0\ud800-\udc7f\udd00-\udfff]")


@dataclass(frozen=True, kw_only=True)
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
    declared = {field.name: field for field in fields(config_class)}
    result = []
    for owner, name, text in _documented_fields(config_class):
        kind, choices, optional = _kind_of(hints[name])
        default = chosen.get(name, declared[name].default)
        values = {label: given[name] for label, given in presets.items() if name in given}
        flag = Flag(
            name=name,
            kind=kind,
            choices=choices,
            optional=optional,
            several=any(get_origin(part) is Sequence for part in get_args(hints[name])),
            required=default is MISSING,
            positional=not declared[name].kw_only,
            default=default,
            section=_title(owner),
            help=f"{text}{_default(default, values)}",
        )
        result.append(flag)
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
    if isinstance(value, list | dict | set):  # whose whole text may be endless, of YAML's aliases
        raise UsageError(f"--{flag.name} takes one value, got {reprlib.repr(value)}")
    if flag.choices:
        text = {True: "on", False: "off"}[value] if isinstance(value, bool) else str(value)
        if text in flag.choices:
            return text
        hint = did_you_mean(text, flag.choices)
        *others, last = flag.choices
        allowed = f"{', '.join(others)} or {last}" if others else last
        raise UsageError(f"--{flag.name} must be {allowed}, got {value!r}{hint}")
    if flag.kind is bool:
        if (text := str(value).lower()) not in (*_YES, *_NO):
            raise UsageError(f"--{flag.name} must be true or false, got {value!r}")
        return text in _YES
    if flag.kind in (int, float):
        return _number(flag, value)
    return _text(flag, value)


def python_value(flag: Flag, value: object) -> object:
    """Value of a flag from a Python caller, who may also give paths, lists and bare numbers.

    A list of names becomes what the flag has; a list that holds objects stays a list. Raises
    UsageError as `parse_value`, and on an object where only a name can stand.
    """
    if isinstance(value, os.PathLike):
        value = os.fspath(value)
    if hasattr(value, "tolist"):  # of NumPy
        value = value.tolist()
    if isinstance(value, list | tuple):
        names = [str(item) for item in value if isinstance(item, str | int | float)]
        return parse_value(flag, ",".join(names)) if len(names) == len(value) else tuple(value)
    if value is not None and not isinstance(value, str | int | float):
        shown = textwrap.shorten(repr(value), width=60, placeholder="...")
        raise UsageError(
            f"{flag.name}={shown} is an object; give its name, 'package.module:NAME', or a path"
        )
    if flag.kind is str and not flag.choices and isinstance(value, int | float):
        value = str(value)
    return parse_value(flag, value)


def flags_given(argv: Sequence[str], config_class: type[Any]) -> list[tuple[str, str]]:
    """Flags of a command line with their values; the name of an argument without a flag is empty.

    Dashes in names are underscores, and a yes-or-no flag without a value is `true`. Raises
    UsageError on an unknown flag and on one without a value.
    """
    known = [field.name for field in fields(config_class)]
    hints = get_type_hints(config_class)
    given = []
    words = [*reversed(argv)]
    while words:
        word = "--help" if words[-1] == "-h" else words[-1]
        words.pop()
        if not word.startswith("--"):
            given.append(("", word))
            continue
        name, equals, value = word[2:].partition("=")
        name = name.replace("-", "_")
        if name not in (*known, *_SWITCHES, "config"):
            hint = did_you_mean(name, [*known, *_SWITCHES, "config"], "--")
            if name == "compression_ratio" and (budget := {"budget", "budgets"} & {*known}):
                hint = f" (a ratio of 0.3 evicts 30%: give --{budget.pop()} 70%)"
            raise UsageError(f"unknown flag --{name}{hint}; --help_all lists all")
        if not equals:
            following = words[-1] if words else "--"
            switch = hints.get(name) is bool and following.lower() not in (*_YES, *_NO)
            if switch or name in _SWITCHES:
                value = "true"
            elif following.startswith("--"):
                raise UsageError(f"--{name} needs a value")
            else:
                value = words.pop()
        given.append((name, value))
    return given


def _yaml(path: str, known: Sequence[str]) -> dict[str, Any]:
    """Settings of a YAML file; UsageError where it is none or names an unknown setting."""
    import yaml  # no sooner: --help stays fast

    try:
        with open(path, encoding="utf-8", opener=regular) as file:
            text = file.read()
        settings, tree = yaml.safe_load(text), yaml.compose(text)
    except OSError as error:
        raise UsageError(f"--config {path}: {error.strerror}") from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        reason = " ".join(str(error).split())
        raise UsageError(f"--config {path} is no YAML file: {reason}") from None
    if not isinstance(settings, dict):
        raise UsageError(f"--config {path} must hold `name: value` lines")
    names = [key.value for key, _ in tree.value]
    for name, value in settings.items():
        if names.count(name) > 1:
            raise UsageError(f"--config {path}: {name!r} is there twice")
        parts = value if isinstance(value, list) else [value]
        if any(isinstance(part, list | dict | set) for part in parts):  # by aliases without an end
            raise UsageError(f"--config {path}: {name!r} holds lists or mappings")
        if name not in known:
            hint = did_you_mean(str(name), known)
            raise UsageError(f"--config {path}: unknown setting {name!r}{hint}")
    return settings


def _documented_fields(config_class: type[Any]) -> Iterator[tuple[type[Any], str, str]]:
    """Each field, the class that documents it and its text, in the order of --help."""
    order = config_class.__mro__[:-1]
    texts = {owner: _documentation(owner.__module__)[owner.__name__] for owner in order}
    owners = {name: owner for owner in reversed(order) for name in texts[owner]}
    titles = [_title(owner) for owner in order]
    for owner in sorted(reversed(order), key=lambda owner: titles.index(_title(owner))):
        for name, text in texts[owner].items():
            if owners[name] is owner:
                yield owner, name, text
    if undocumented := {field.name for field in fields(config_class)} - set(owners):
        raise TypeError(f"{config_class.__name__}: {sorted(undocumented)} have no docstring")


def _title(owner: type[Any]) -> str:
    """First line of a docstring, without its full stop."""
    return (owner.__doc__ or "").strip().partition("\n")[0].rstrip(".")


@functools.cache
def _documentation(module: str) -> dict[str, dict[str, str]]:
    """Docstrings under the fields that each class of a module itself declares."""
    tree = ast.parse(inspect.getsource(sys.modules[module]))
    return {
        node.name: {
            ast.unparse(statement.target): " ".join(ast.literal_eval(following.value).split())
            for statement, following in itertools.pairwise(node.body)
            if isinstance(statement, ast.AnnAssign) and isinstance(following, ast.Expr)
            if "ClassVar" not in ast.unparse(statement.annotation)
        }
        for node in tree.body
        if isinstance(node, ast.ClassDef)
    }


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


def _default(default: object, values: Mapping[str, Any]) -> str:
    """The default for --help, and what other presets have."""
    if default is MISSING:
        return " (required)"
    if default is None or default == "":
        return ""
    others = [f"{name}: {_value_text(value)}" for name, value in values.items() if value != default]
    return f" (default: {_value_text(default)}{'; ' + ', '.join(others) if others else ''})"


def _value_text(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _text(flag: Flag, value: object) -> str:
    if not isinstance(value, str):
        raise UsageError(f"--{flag.name} must be text; in YAML put it in quotes, got {value!r}")
    if odd := _NO_NAME.search(value):
        raise UsageError(f"--{flag.name} has the character {odd[0]!a}, got {value!r}")
    return value


def _number(flag: Flag, value: object) -> int | float:
    if type(value) in ((str, int) if flag.kind is int else (str, int, float)):
        with suppress(ValueError, OverflowError):
            number: int | float = flag.kind(value)
            if math.isfinite(number):
                return number
    what = "a whole number" if flag.kind is int else "a number"
    raise UsageError(f"--{flag.name} must be {what}, got {value!r}")


def main(
    load: Callable[[], type[ConfigT]],
    run: Callable[[ConfigT], object],
    *,
    argv: Sequence[str],
    prog: str,
    description: str = "",
    examples: Sequence[str] = (),
) -> int:
    """Parse `argv` into the config that `load` returns, call `run`, and return the exit code.

    It is that of `call_program`, whose signals and errors hold from the first import on.
    `--help`, `--version` and `--print_config` leave by SystemExit(0).
    """

    def program() -> None:
        config = parse(load(), argv, prog=prog, description=description, examples=examples)
        config.check_names()
        run(config)

    return call_program(program, prog)


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
    given = flags_given(argv, config_class)
    known = [field.name for field in fields(config_class)]
    from_files: dict[str, Any] = {}
    for name, value in given:
        if name == "config":
            from_files |= _yaml(value, known)
    named = {name: value for name, value in given if name}
    preset = named.get("preset", from_files.get("preset"))
    preset = preset if isinstance(preset, str) else None
    flags = {flag.name: flag for flag in flags_of(config_class, preset)}
    if "version" in named:
        print(f"{prog} {__version__}", flush=True)
        raise SystemExit(0)
    if "help" in named or "help_all" in named:
        shown = set(flags) if "help_all" in named else set(visible_flags(config_class))
        print(_help(list(flags.values()), shown, prog, description, examples), flush=True)
        raise SystemExit(0)
    settings = _values(flags, from_files, given)
    if "print_config" in named:
        import yaml

        print(yaml.safe_dump(settings, sort_keys=False), end="", flush=True)
        raise SystemExit(0)
    missing = [_flag_text(flag) for flag in flags.values() if flag.name not in settings]
    if missing:
        raise UsageError(f"{', '.join(missing)} is missing")
    try:
        return config_class(**settings)
    except ValueError as error:
        raise UsageError(str(error)) from None


def _values(
    flags: Mapping[str, Flag], from_files: Mapping[str, Any], given: Sequence[tuple[str, str]]
) -> dict[str, Any]:
    """Settings by name: defaults, under those of files, under arguments and flags."""
    settings = {flag.name: flag.default for flag in flags.values() if not flag.required}
    for name, value in from_files.items():
        several = flags[name].several and isinstance(value, list)
        values = [parse_value(flags[name], item) for item in (value if several else [value])]
        settings[name] = values if several else values[0]
    for name, value in given:
        if name in flags:
            settings[name] = parse_value(flags[name], value)
    arguments = [value for name, value in given if not name]
    for flag in flags.values():
        if flag.positional and arguments:
            count = len(arguments) if flag.several else 1
            values = [parse_value(flag, argument) for argument in arguments[:count]]
            settings[flag.name] = values if flag.several else values[0]
            del arguments[:count]
    if arguments:
        raise UsageError(f"unknown argument {arguments[0]!r}")
    return settings


def _flag_text(flag: Flag) -> str:
    return flag.name.upper() if flag.positional else f"--{flag.name}"


def _help(
    flags: Sequence[Flag], shown: set[str], prog: str, description: str, examples: Sequence[str]
) -> str:
    """What --help prints: flags in a column, those of a group together; `shown` ones only."""
    needed = "".join(
        f"{_flag_text(flag)} " + ("" if flag.positional else f"{flag.metavar} ")
        for flag in flags
        if flag.required
    )
    lines = [f"usage: {prog} {needed}[--config FILE] [--FLAG VALUE ...]", ""]
    lines += [*textwrap.wrap(description, 98), "", "options:"]
    lines += _row("-h, --help", "Print this and exit.")
    lines += _row("--config FILE", "YAML file with any of these settings.")
    lines += _row("--print_config", "Print all settings as YAML and exit.")
    lines += _row("--version", "Print the version and exit.")
    visible = [flag for flag in flags if flag.name in shown]
    for section, group in itertools.groupby(visible, key=lambda flag: flag.section):
        lines += ["", f"{section}:"]
        for flag in group:
            name = _flag_text(flag) if flag.positional else f"{_flag_text(flag)} {flag.metavar}"
            lines += _row(name, flag.help)
    if examples:
        lines += ["", "examples:", *(f"  {line}" for line in examples)]
    if hidden := len(flags) - len(visible):
        lines += ["", f"{hidden} more settings, as flags or in YAML: {prog} --help_all"]
    return "\n".join(lines)


def _row(name: str, text: str) -> list[str]:
    """A flag and its help, beside each other or, where the name is long, below."""
    lines = textwrap.wrap(text, 72, break_long_words=False)
    if len(name) <= 22:
        lines[0] = f"  {name:<24}{lines[0]}"
        return [lines[0], *(" " * 26 + line for line in lines[1:])]
    return [f"  {name}", *(" " * 26 + line for line in lines)]
