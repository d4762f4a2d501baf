"""How a program ends: an exit code and, unless all went well, one line on stderr.

The line is printed as it is: nothing in a path or a name is read as markup.
"""

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from kvp.errors import KvpError, first_line, one_line

USER_ERROR = 2
INTERRUPTED = 130
TERMINATED = 143
BROKEN_PIPE = 141
_NO_MEMORY = ("allocate memory", "Tried to allocate")  # in torch's errors


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
        if isinstance(error, RuntimeError) and not any(part in str(error) for part in _NO_MEMORY):
            raise
        return _end(prog, error, f"error: out of memory ({first_line(error)})", USER_ERROR)
    except BrokenPipeError:
        _forget_output()
        sys.stderr.close()  # the reader of the output has gone: say nothing
        return BROKEN_PIPE
    except OSError as error:
        _forget_output()
        names = [str(name) for name in (error.filename, error.filename2) if name is not None]
        where = f"{' -> '.join(names)}: " if names else ""
        return _end(prog, error, f"error: {where}{error.strerror or error}", USER_ERROR)
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
