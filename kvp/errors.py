"""Errors a user can cause, each a line that names the flag or file and what to do.

Bugs are not `KvpError`s: they keep their traceback. How a program ends: `kvp.program.exit_codes`.
"""

import inspect
import warnings
from collections.abc import Iterable
from difflib import get_close_matches
from textwrap import shorten

from kvp.own_packages import NOT_A_USERS


class KvpError(Exception):
    """Base of every error a user can cause; its text is one line, whatever a file or name holds."""

    def __str__(self) -> str:
        return one_line(super().__str__())


class UsageError(KvpError):
    """A flag or an argument that cannot work; the message names it."""


class ModelError(KvpError):
    """A model or tokenizer that is missing or that kvp cannot evict from."""


class StoreError(KvpError):
    """A trace store that is damaged, incomplete or does not match the request."""


class PolicyError(KvpError):
    """A policy directory that is damaged or was made for another geometry."""


class ContextError(KvpError):
    """A context, slot file or engine state that is damaged or was made by another model."""


class ResultsError(KvpError):
    """A results folder that is damaged or belongs to another configuration."""


class AddressError(KvpError):
    """An address of an object store that cannot be understood, reached, read or written."""


def one_line(text: str) -> str:
    """A text without line ends, and with what could steer a terminal as escapes."""
    line = " ".join(text.split()) if "\n" in text else text
    return "".join(char if char.isprintable() else ascii(char)[1:-1] for char in line)


def first_line(error: BaseException, width: int = 120) -> str:
    """What an error of another library says, in one short line; its type where it says nothing."""
    text = str(error).strip().partition("\n")[0]
    return shorten(text, width=width, placeholder=" ...") or type(error).__name__


def reason_of(error: BaseException) -> str:
    """An exception in one line: its kind and its message."""
    return " ".join(f"{type(error).__name__}: {error}".split())


def did_you_mean(name: str, known: Iterable[str], prefix: str = "", cutoff: float = 0.6) -> str:
    """For messages on an unknown `name`: the nearest known one, whatever its case; "" without."""
    names = {choice.lower(): choice for choice in known if choice != name}
    near = get_close_matches(name.lower(), names, n=1, cutoff=cutoff)
    return f" (did you mean {prefix}{names[near[0]]}?)" if near else ""


def name_meant(name: str, names: Iterable[str], unlisted: Iterable[str] = ()) -> str:
    """For messages on an unknown `name`: the nearest known one, and all but the `unlisted`."""
    known = list(names)
    guess = did_you_mean(name, [*known, *unlisted])
    return f"{guess}; use {', '.join(known)} or package.module:Name"


def warn_caller(text: str) -> None:
    """Warn at the caller's line: the innermost outside of kvp and of installed packages."""
    frame, level = inspect.currentframe(), 1
    while frame and frame.f_back and frame.f_code.co_filename.startswith(NOT_A_USERS):
        frame, level = frame.f_back, level + 1
    warnings.warn(text, stacklevel=level)
