"""The command line of a program: config -> flags, YAML + flags -> config, one-line errors.

Flags come from the fields of the config's groups (`kvp.program.settings`). Misspelt names are
corrected before anything of the program is imported.
"""

from __future__ import annotations

import ast
import functools
import inspect
import itertools
import os
import sys
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from types import NoneType, UnionType
from typing import TYPE_CHECKING, Any, TypeVar, Union, get_args, get_origin, get_type_hints

from kvp.errors import UsageError, did_you_mean
from kvp.specification import split_commas
from kvp.version import __version__

if TYPE_CHECKING:
    from kvp.program.settings import Group

ConfigT = TypeVar("ConfigT", bound="Group")

_SWITCHES = ("help", "version")
_YES = ("true", "yes", "on")
_NO = ("false", "no", "off")
_AS_TEXT = "; in YAML write several as `a,b`"


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
    positional: bool
    """Whether it is an argument without a flag: fields that are not keyword-only are."""
    default: Any
    """Value without the flag, with the chosen preset; MISSING where it must be given."""
    section: str
    help: str
    """Docstring of the field and the default."""

    @property
    def written(self) -> str:
        """As --help writes it: `--NAME VALUE`, and an argument without a flag as `NAME`."""
        if self.positional:
            return self.name.upper()
        kinds = {bool: "true|false", int: "N", float: "X", str: "TEXT"}
        value = f"{{{','.join(self.choices)}}}" if self.choices else kinds[self.kind]
        return f"--{self.name} {value}"


def flags_of(config_class: type[Group], preset: object = None) -> dict[str, Flag]:
    """Flags of a config by name: its own first, then those of each group it inherits.

    Groups of one title follow one another, the most general first. A config with presets has
    `PRESETS`: name -> the values it gives, the first one the default.
    """
    presets = config_class.PRESETS
    chosen = presets.get(str(preset), next(iter(presets.values()), {}))
    hints = get_type_hints(config_class)
    declared = {field.name: field for field in fields(config_class)}
    order = config_class.__mro__[:-1]
    texts = {owner: _documentation(owner.__module__)[owner.__name__] for owner in order}
    owners = {name: owner for owner in reversed(order) for name in texts[owner]}
    titles = [_title(owner) for owner in order]
    sections = sorted(reversed(order), key=lambda owner: titles.index(_title(owner)))
    result = {}
    for owner in sections:
        for name, text in texts[owner].items():
            if owners[name] is not owner:
                continue
            hint = hints[name]
            parts = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
            # A sequence is what a Python caller may give in place of text.
            scalars = [part for part in parts if get_origin(part) is not Sequence]
            (scalar,) = [part for part in scalars if part is not NoneType]
            choices = get_args(scalar)
            default = chosen.get(name, declared[name].default)
            result[name] = Flag(
                name=name, kind=str if choices else scalar, choices=choices,
                optional=NoneType in parts, several=len(scalars) < len(parts),
                positional=not declared[name].kw_only, default=default, section=_title(owner),
                help=text + _default(default),
            )  # fmt: skip
    return result


def parse_value(flag: Flag, value: object) -> object:
    """Value of a flag from command-line text or a YAML scalar; UsageError names what it takes."""
    name = flag.written.split()[0]
    if value is None or (flag.optional and value in ("null", "None")):
        if flag.optional:
            return None
        raise UsageError(f"{name} needs a value")
    if isinstance(value, list | dict):
        raise UsageError(f"{name} takes one value" + _AS_TEXT * (not flag.positional))
    if flag.choices:
        text = {True: "on", False: "off"}[value] if isinstance(value, bool) else str(value)
        if text in flag.choices:
            return text
        hint = did_you_mean(text, flag.choices)
        *others, last = flag.choices
        allowed = f"{', '.join(others)} or {last}" if others else last
        raise UsageError(f"{name} must be {allowed}, got {value!r}{hint}")
    if flag.kind is bool:
        if (text := str(value).lower()) not in (*_YES, *_NO):
            raise UsageError(f"{name} must be true or false, got {value!r}")
        return text in _YES
    if flag.kind in (int, float):
        return _number(flag, value)
    if not isinstance(value, str):
        raise UsageError(f"{name} must be text; in YAML put it in quotes, got {value!r}")
    return value


def python_value(flag: Flag, value: object) -> object:
    """Value of a flag from a Python caller, who may also give paths, lists and bare numbers.

    A list of names becomes what the flag has; a list that holds objects stays a list. Raises
    UsageError on a value that the flag does not take, such as an object where only a name can be.
    """
    if isinstance(value, os.PathLike):
        value = os.fspath(value)
    if hasattr(value, "tolist"):  # of NumPy
        value = value.tolist()
    if isinstance(value, list | tuple):
        names = [str(item) for item in value if isinstance(item, str | int | float)]
        if len(names) == len(value):
            if parted := [name for name in names if len(split_commas(name)) > 1]:
                raise UsageError(f"{flag.name}: {parted[0]!r} has a comma, which parts names")
            return parse_value(flag, ",".join(names))
        if flag.several:
            return tuple(value)
    if value is not None and not isinstance(value, str | int | float):
        shown = textwrap.shorten(repr(value), width=60, placeholder="...")
        mend = "give its name, 'package.module:NAME', or a path"
        mend = "put it in a list" if flag.several else mend
        raise UsageError(f"{flag.name}={shown} is an object; {mend}")
    if flag.kind is str and not flag.choices and isinstance(value, int | float):
        value = str(value)
    return parse_value(flag, value)


def flags_given(argv: Sequence[str], flags: Mapping[str, Flag]) -> list[tuple[str, str]]:
    """Flags and arguments of a command line, as names and values; "" names one too many.

    Dashes in names are underscores, and a yes-or-no flag without a value is `true`. Raises
    UsageError on an unknown flag and on one without a value.
    """
    places = itertools.chain.from_iterable(
        itertools.repeat(flag.name) if flag.several else [flag.name]
        for flag in flags.values()
        if flag.positional
    )
    names = [*flags, *_SWITCHES, "config"]
    pairs = []
    words = [*reversed(argv)]
    while words:
        word = words.pop()
        word = "--help" if word == "-h" else word
        if not word.startswith("--"):
            pairs.append((next(places, ""), word))
            continue
        name, equals, value = word[2:].partition("=")
        name = name.replace("-", "_")
        if name not in names:
            hint = did_you_mean(name, names, "--")
            raise UsageError(f"unknown flag --{name}{hint}; --help lists all")
        if not equals:
            following = words[-1] if words else "--"
            switch = name in flags and flags[name].kind is bool
            if name in _SWITCHES or (switch and following.lower() not in (*_YES, *_NO)):
                value = "true"
            elif following.startswith("--"):
                raise UsageError(f"--{name} needs a value")
            else:
                value = words.pop()
        pairs.append((name, value))
    return pairs


def _yaml(path: str, known: Iterable[str]) -> dict[str, Any]:
    """Settings of a YAML file; UsageError where it is none or names an unknown setting."""
    import yaml  # no sooner: --help stays fast

    try:
        text = Path(path).read_text(encoding="utf-8")
        settings = yaml.safe_load(text)
    except OSError as error:
        raise UsageError(f"--config {path}: {error.strerror}") from None
    except (yaml.YAMLError, ValueError) as error:
        reason = " ".join(str(error).split())
        raise UsageError(f"--config {path} is no YAML file: {reason}") from None
    if not isinstance(settings, dict):
        raise UsageError(f"--config {path} must hold `name: value` lines")
    names = [key.value for key, _ in yaml.compose(text).value]
    for name in settings:
        if names.count(name) > 1:
            raise UsageError(f"--config {path}: {name!r} is there twice")
        if name not in known:
            hint = did_you_mean(str(name), known)
            raise UsageError(f"--config {path}: unknown setting {name!r}{hint}")
    return settings


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


def _default(default: object) -> str:
    if default is MISSING:
        return " (required)"
    if default is None or default == "":
        return ""
    return f" (default: {str(default).lower() if isinstance(default, bool) else default})"


def _number(flag: Flag, value: object) -> int | float:
    if type(value) in ((str, int) if flag.kind is int else (str, int, float)):
        with suppress(ValueError, OverflowError):
            number: int | float = flag.kind(value)
            if abs(number) < 2**60:  # what rows hold (`eval.results.record_schemas`)
                return number
    what = "a whole number" if flag.kind is int else "a number"
    raise UsageError(f"--{flag.name} must be {what} below 2**60, got {value!r}")


def parse_arguments(
    config_class: type[ConfigT],
    argv: Sequence[str],
    *,
    prog: str = "kvp",
    description: str = "",
    examples: Sequence[str] = (),
) -> ConfigT:
    """Config that the arguments describe: defaults, under the preset, under YAML, under flags.

    Raises UsageError on anything that cannot work; `--help` and `--version` leave by SystemExit(0).
    """
    flags = flags_of(config_class)
    pairs = flags_given(argv, flags)
    from_files: dict[str, Any] = {}
    for name, value in pairs:
        if name == "config":
            from_files |= _yaml(value, flags)
    named = from_files | dict(pairs)
    flags = flags_of(config_class, named.get("preset"))
    if "version" in named:
        print(f"{prog} {__version__}", flush=True)
        raise SystemExit(0)
    if "help" in named:
        print(_help(flags, prog, description, examples), flush=True)
        raise SystemExit(0)
    return make_config(config_class, flags, _values(flags, from_files, pairs))


def make_config(
    config_class: type[ConfigT], flags: Mapping[str, Flag], settings: Mapping[str, Any]
) -> ConfigT:
    """Config of settings and other defaults; UsageError on what is missing or cannot work."""
    values = {name: settings.get(name, flag.default) for name, flag in flags.items()}
    missing = [flags[name].written.split()[0] for name in values if values[name] is MISSING]
    if missing:
        raise UsageError(f"{', '.join(missing)} is missing")
    return config_class(**values)


def _values(
    flags: Mapping[str, Flag], from_files: Mapping[str, Any], given: Sequence[tuple[str, str]]
) -> dict[str, Any]:
    """Settings by name: those of files, under arguments and flags."""
    settings: dict[str, Any] = {}
    for name, value in from_files.items():
        many = value and isinstance(value, list) and flags[name].positional and flags[name].several
        parsed = [parse_value(flags[name], one) for one in (value if many else [value])]
        settings[name] = parsed if many else parsed[0]
    if unknown := [value for name, value in given if not name]:
        needed = ", ".join(one.written for one in flags.values() if one.default is MISSING)
        raise UsageError(f"unknown argument {unknown[0]!r}; needed: {needed or 'flags alone'}")
    for flag in (flags[name] for name in dict(given) if name in flags):
        values = [parse_value(flag, value) for name, value in given if name == flag.name]
        if flag.positional and len(values) > 1 and not flag.several:
            raise UsageError(f"{flag.written} is given twice")
        settings[flag.name] = values if flag.several and flag.positional else values[-1]
    return settings


def _help(flags: Mapping[str, Flag], prog: str, description: str, examples: Sequence[str]) -> str:
    """What --help prints: flags in a column, those of a group together."""
    needed = "".join(f"{flag.written} " for flag in flags.values() if flag.default is MISSING)
    lines = [f"usage: {prog} {needed}[--config FILE] [--FLAG VALUE ...]", ""]
    lines += [*textwrap.wrap(description, 98), "", "options:"]
    lines += _row("-h, --help", "Print this and exit.")
    lines += _row("--config FILE", "YAML file with any of these settings.")
    lines += _row("--version", "Print the version and exit.")
    for section, group in itertools.groupby(flags.values(), key=lambda flag: flag.section):
        lines += ["", f"{section}:"]
        for flag in group:
            lines += _row(flag.written, flag.help)
    if examples:
        lines += ["", "examples:", *(f"  {line}" for line in examples)]
    return "\n".join(lines)


def _row(name: str, text: str) -> list[str]:
    """A flag and its help, beside each other or, where the name is long, below."""
    space, beside = " " * 26, len(name) <= 22
    first = f"  {name:<24}" if beside else space
    lines = textwrap.wrap(
        text, 98, initial_indent=first, subsequent_indent=space, break_long_words=False
    )
    return lines if beside else [f"  {name}", *lines]
