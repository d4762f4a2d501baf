"""Errors a user can cause, and how a program ends: one line on stderr, and an exit code.

Each message names the flag or file and what to do, and is printed as it is: nothing in a path or a
name is read as markup. Bugs are not `KvpError`s: they keep their traceback.
"""

from __future__ import annotations

import os
import re
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from difflib import get_close_matches
from textwrap import shorten
from types import FrameType

USER_ERROR = 2
INTERRUPTED = 130
TERMINATED = 143
BROKEN_PIPE = 141


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


class CacheError(KvpError):
    """A cache file that is damaged or was made by another model."""


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


@contextmanager
def in_python() -> Iterator[None]:
    """Around a call from Python: messages name settings without the dashes of their flags."""
    try:
        yield
    except KvpError as error:
        error.args = (re.sub(r"(?<![\w-])--(?=[a-z])", "", str(error)),)
        raise


class Terminated(BaseException):
    """SIGTERM has arrived; not an Exception, so that nothing on the way swallows it."""


def call_program(
    program: Callable[[], object], prog: str, *, again: str = "the same command continues"
) -> int:
    """Call `program` and return the exit code.

    0 on success; 2 on a `KvpError`, on an OSError (disk full, no permission) and where memory ends,
    each one line on stderr; 130 on Ctrl-C, 143 on SIGTERM. `again` says what an interrupted run
    left behind, notes of the exception how far it came.
    """
    try:
        with _sigterm_raises():
            program()
            _flush()
    except KvpError as error:
        return _end(prog, error, f"error: {error}", USER_ERROR)
    except KeyboardInterrupt as error:
        return _end(prog, error, "interrupted", INTERRUPTED, again)
    except Terminated as error:
        return _end(prog, error, "terminated", TERMINATED, again)
    except (MemoryError, RuntimeError) as error:  # torch has errors of its own
        if not isinstance(error, MemoryError) and "allocate" not in str(error):
            raise
        return _end(prog, error, f"error: out of memory ({first_line(error)})", USER_ERROR)
    except BrokenPipeError:
        _forget_output()
        sys.stderr.close()  # the reader of the output has gone: say nothing
        return BROKEN_PIPE
    except OSError as error:
        _forget_output()
        names = [str(name) for name in (error.filename, error.filename2) if name is not None]
        parts = [*(" -> ".join(names),) * bool(names), error.strerror or str(error)]
        return _end(prog, error, f"error: {': '.join(parts)}", USER_ERROR)
    return 0


def _flush() -> None:
    """Bring what was printed to where it goes, or raise an OSError that says so."""
    try:
        print(end="", flush=True)
    except OSError as error:
        raise OSError(error.errno, error.strerror, "standard output") from None


def _forget_output() -> None:
    """Let Python, when it ends, not try once more to write what its standard output refuses."""
    try:
        _flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


@contextmanager
def _sigterm_raises() -> Iterator[None]:
    """Turn SIGTERM into `Terminated` in the main thread, where signals arrive."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(number: int, frame: FrameType | None) -> None:
        raise Terminated

    earlier = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, earlier)


def _end(prog: str, error: BaseException, message: str, code: int, *more: str) -> int:
    parts = (message, *getattr(error, "__notes__", ()), *more)
    print(f"{prog}: {one_line('; '.join(parts))}", file=sys.stderr)
    return code
