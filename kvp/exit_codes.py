"""How a program ends: a user's error is one line and exit code 2, bugs keep a traceback.

Messages are printed as they are; nothing in a path or a name is read as markup.
"""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from kvp.errors import KvpError

USER_ERROR = 2
INTERRUPTED = 130
TERMINATED = 143
BROKEN_PIPE = 141


class Terminated(BaseException):
    """SIGTERM has arrived; not an Exception, so that nothing on the way swallows it."""


def guarded(
    program: Callable[[], object], prog: str, *, again: str = "the same command continues"
) -> int:
    """Call `program` and return the exit code.

    0 on success; 2 on a `KvpError` and on an OSError (disk full, no permission), each one line on
    stderr; 130 on Ctrl-C, 143 on SIGTERM. `again` says what an interrupted run left behind.
    """
    try:
        with _sigterm_raises():
            program()
    except KvpError as error:
        return _end(prog, f"error: {error}", USER_ERROR)
    except KeyboardInterrupt:
        return _end(prog, f"interrupted; {again}", INTERRUPTED)
    except Terminated:
        return _end(prog, f"terminated; {again}", TERMINATED)
    except BrokenPipeError:
        sys.stderr.close()  # the reader of the output has gone: say nothing
        return BROKEN_PIPE
    except OSError as error:
        return _end(prog, f"error: {_of_system(error)}", USER_ERROR)
    return 0


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


def _of_system(error: OSError) -> str:
    """The file and the system's error message."""
    files = [str(name) for name in (error.filename, error.filename2) if name is not None]
    return ": ".join([*(" -> ".join(files),) * bool(files), error.strerror or str(error)])


def _end(prog: str, message: str, code: int) -> int:
    print(f"{prog}: {' '.join(message.split())}", file=sys.stderr)
    return code
