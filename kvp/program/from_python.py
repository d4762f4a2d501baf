"""Programs and functions from Python: settings as keywords, names of methods, and messages."""

import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import wraps
from inspect import signature
from typing import Any

from kvp.errors import KvpError, UsageError, did_you_mean
from kvp.own_packages import import_own
from kvp.program.command_line import flags_of, make_config, python_value
from kvp.program.programs import PROGRAMS, load


@contextmanager
def in_python() -> Iterator[None]:
    """Around a call from Python: flags have no dashes but in commands of kvp and in quotes."""
    try:
        yield
    except KvpError as error:
        command = rf"\bkvp (?:{'|'.join(PROGRAMS)})\b(?:[^,;:.)]|[,;:.](?=\S))*"  # its whole clause
        quoted = r"(?<!\w)'[^']*'|(?<!\w)\"[^\"]*\""
        flag = rf"(?<![\w-])--(?=(?:{'|'.join(_flags())})(?![\w-]))"
        error.args = (re.sub(rf"({command}|{quoted})|{flag}", r"\1", str(error)),)
        raise


def _flags() -> set[str]:
    """Flags of all programs, as far as no package of the caller's has taken their names."""
    flags: set[str] = set()
    for program in PROGRAMS.values():
        with suppress(ImportError):
            flags.update(flags_of(load(program.config)) if program.config else ())
    return flags


@contextmanager
def settings_of(package: str, config: str, settings: dict[str, Any]) -> Iterator[Any]:
    """The config of a program; the tasks among its settings are known inside the context.

    Raises UsageError, naming the setting, on what cannot work.
    """
    config_class = load(f"{package}.config:{config}")
    flags = flags_of(config_class, settings.get("preset"))
    for name in settings:
        if name not in flags:
            raise UsageError(f"unknown setting {name!r}{did_you_mean(name, flags)}")
    with _naming_tasks(settings) as named:
        values = {name: python_value(flags[name], value) for name, value in named.items()}
        configured = make_config(config_class, flags, values)
        configured.check_names()
        yield configured


@contextmanager
def _naming_tasks(settings: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Settings in which tasks are names, which are known inside the context."""
    if (tasks := settings.get("tasks")) is None:
        yield settings
        return
    tasks = [tasks] if isinstance(tasks, str) else tasks
    if not isinstance(tasks, Iterable):
        raise UsageError(f"tasks={tasks!r:.60} is an object; put it in a list")
    if settings.get("engine") == "ray" and not all(isinstance(task, str) for task in tasks):
        raise UsageError("engine='ray' takes tasks by name: objects stay in a process")
    with import_own("kvp.data.tasks").naming_tasks(tasks) as names:
        yield {**settings, "tasks": names}


def take_names(function: Callable[..., Any], resolve: Callable[..., Any]) -> Callable[..., Any]:
    """Let `scorer` and `allocator` of a function be names: "snapkv+ada", "nano", "org/name".

    `resolve` makes objects of both.
    """

    @wraps(function)
    def taking_names(*args: Any, **options: Any) -> Any:  # noqa: ANN401
        taken = signature(function)
        if unknown := [name for name in options if name not in taken.parameters]:
            near = did_you_mean(unknown[0], taken.parameters) or "; `budget` says how much stays"
            raise TypeError(f"{function.__name__} has no argument {unknown[0]!r}{near}")
        try:
            bound = taken.bind(*args, **options)
        except TypeError as error:
            raise TypeError(f"{function.__name__}() {error}") from None
        sides = bound.arguments["scorer"], bound.arguments.get("allocator")
        if any(isinstance(side, str) for side in sides):
            objects = resolve(*sides)
            bound.arguments["scorer"], bound.arguments["allocator"] = objects
        return function(*bound.args, **bound.kwargs)

    return taking_names
