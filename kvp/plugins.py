"""Imports of a user's own code by name, `package.module:Name`.

Nothing is imported before its name is used, nor are the built-in components of a `Registry`.
Whatever goes wrong inside foreign code, an exit included, becomes one line that names it.
"""

import importlib
import json
import os
import re
import sys
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from inspect import getattr_static, signature
from typing import Any

from kvp.errors import KvpError, UsageError, did_you_mean, name_meant, reason_of
from kvp.own_packages import NAMES, NOT_A_USERS

_OBJECT = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")


@dataclass(frozen=True)
class Registry:
    """Components of one kind that kvp has: name -> `module:attribute`."""

    flag: str
    """Flag that names a component, for messages: `--label`."""
    builtin: Mapping[str, str]

    def check(self, name: str) -> None:
        """Raise UsageError unless a name can stand for a component; nothing is imported."""
        if name not in self.builtin and not is_object_name(name):
            raise UsageError(f"{self.flag} {name!r} is unknown{name_meant(name, self.builtin)}")

    def load(self, name: str) -> Any:  # noqa: ANN401
        """The component of a name; UsageError, naming the flag, where it cannot be imported."""
        self.check(name)
        if name in self.builtin:
            return _attribute(self.builtin[name])
        return import_object(name, self.flag)


def is_object_name(name: str) -> bool:
    """Whether `name` is written `package.module:Name`."""
    return _OBJECT.fullmatch(name) is not None


def module_exists(name: str) -> bool:
    """Whether the module of `package.module:Name` can be found; `__main__` always is."""
    if name.partition(":")[0] in sys.modules:
        return True
    with _working_folder():
        try:
            return find_spec(name.partition(":")[0]) is not None
        except KeyboardInterrupt:
            raise
        except BaseException:
            return False


def import_object(name: str, what: str) -> Any:  # noqa: ANN401
    """The object `package.module:Name`; the working folder is searched after installed packages.

    Raises UsageError, which begins with `what` and the name, whatever goes wrong.
    """
    try:
        with _working_folder():
            return _attribute(name)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # foreign code: SystemExit and all
        module, _, path = name.partition(":")
        names = vars(sys.modules[module]) if module in sys.modules else ()  # it was imported
        more = did_you_mean(path, names, f"{module}:")
        more += " (kvp has a package of this name: rename your file)" if module in NAMES else ""
        raise UsageError(f"{what} {name}{more}: cannot be loaded ({reason_of(error)})") from error


def class_label(kind: str, component: object) -> str:
    """A class, or the class of an object, in messages: `scorer Mine`."""
    return f"{kind} {(component if isinstance(component, type) else type(component)).__name__}"


def instance_of(component: object, label: str, options: Mapping[str, Any] | None = None) -> object:
    """The object itself, or one of a class, made with `options`; UsageError begins with `label`."""
    if not isinstance(component, type):
        if options:
            raise UsageError(f"{label} is an object; options are for classes")
        return component
    try:
        return component(**(options or {}))
    except (KvpError, KeyboardInterrupt):
        raise
    except BaseException as error:  # foreign code: SystemExit and all
        raise UsageError(f"{label} cannot be made: {reason_of(error)}") from error


class OptionalParts:
    """What an object may have besides its contract: its own, or else the values of the class."""

    digest: str | None = None
    """SHA-256 of the file that it is made from."""

    def __init__(self, component: object) -> None:
        self._component = component

    def __getattribute__(self, name: str) -> Any:  # noqa: ANN401 - only what is asked for is read
        component, default = map(super().__getattribute__, ("_component", name))
        if getattr_static(component, name, None) is None:  # else a property that fails is told
            return getattr(component, name, default)
        with user_errors(component, f"{type(component).__name__}.{name}"):
            return getattr(component, name)


def options_of(component: object) -> dict[str, str]:
    """Arguments that an object was made with, where it keeps them: text of what JSON can hold."""
    made_with = signature(type(component)).parameters
    attributes = getattr(component, "__dict__", {}).items()
    kept = {name.removeprefix("_"): value for name, value in attributes}
    text = partial(json.dumps, default=lambda value: type(value).__name__, skipkeys=True)
    return {name: text(kept[name]) for name in made_with if name in kept}


def identity_of(component: object) -> object:
    """What tells objects of a class apart: digest and options, or without digest themselves."""
    digest = OptionalParts(component).digest
    return component if digest is None else (digest, options_of(component))


def require(what: str, extra: str, *packages: str, error: type[KvpError] = UsageError) -> None:
    """Raise `error`, which begins with `what`, where a package of an extra of kvp is missing."""
    for package in packages:
        if find_spec(package) is None:
            raise error(
                f"{what} needs the package {package}: pip install -e '.[{extra}]' in kvp's folder"
            )


@contextmanager
def user_errors(code: object, what: str, hint: str = "") -> Iterator[None]:
    """Around a call of `code`, a component: where it is a user's own, its errors become one line.

    The line begins with `what` and ends with the place of the error, and with a `hint` where an
    object was not what the code took it for. Errors of kvp's own code are bugs and pass.
    """
    owner = getattr(code, "__self__", code)  # of a method its object
    module = getattr(owner, "__module__", None) or ""
    module = getattr(owner, "__globals__", {}).get("__name__", module)  # behind functools.wraps
    try:
        yield
    except KvpError:
        raise
    except (Exception, SystemExit) as error:
        if module.partition(".")[0] in ("kvp", *NAMES):
            raise
        more = hint if isinstance(error, AttributeError | TypeError) else ""
        raise UsageError(f"{what} failed ({reason_of(error)}{_place(error)}){more}") from error


def _place(error: BaseException) -> str:
    """The last line of a user's own code that an error came through."""
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if not frame.filename.startswith((*NOT_A_USERS, "<")):
            return f"; {os.path.basename(frame.filename)} line {frame.lineno}"
    return ""


def _attribute(name: str) -> Any:  # noqa: ANN401
    module, _, path = name.partition(":")
    attribute: Any = importlib.import_module(module)
    for part in path.split("."):
        attribute = getattr(attribute, part)
    return attribute


@contextmanager
def _working_folder() -> Iterator[None]:
    """Search the working folder last: console scripts do not have it on their path."""
    here = os.getcwd()
    if here in sys.path or "" in sys.path:
        yield
        return
    sys.path.append(here)
    try:
        yield
    finally:
        sys.path.remove(here)
