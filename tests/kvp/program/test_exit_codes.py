"""Exit codes of programs, and the line of an error that a user can mend."""

import errno
import os
import signal
import threading
from unittest.mock import Mock

import pytest

from kvp.errors import StoreError
from kvp.program.exit_codes import call_program


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (StoreError("traces/[bold] is\n damaged"), 2, "p: error: traces/[bold] is damaged"),
        (OSError(errno.ENOSPC, "No space left on device", "out/x"), 2,
         "p: error: out/x: No space left on device"),
        (OSError(errno.EROFS, "Read-only file system", "a", None, "b"), 2,
         "p: error: a -> b: Read-only file system"),
        (OSError("no file named"), 2, "p: error: no file named"),
        (PermissionError(errno.EACCES, "Permission denied", "q"), 2,
         "p: error: q: Permission denied"),
        (KeyboardInterrupt(), 130, "p: interrupted; the same command continues"),
    ],
)  # fmt: skip
def test_what_the_user_can_mend_is_one_line(error, code, line, capsys):
    assert call_program(Mock(side_effect=error), "p") == code
    assert capsys.readouterr().err == line + "\n"


def test_sigterm_ends_with_143_and_the_earlier_handler_returns(capsys):
    before = signal.getsignal(signal.SIGTERM)
    cleaned = []

    def program():
        try:
            os.kill(os.getpid(), signal.SIGTERM)
        except Exception:  # what a broad handler on the way would do
            cleaned.append("swallowed")
        finally:
            cleaned.append("closed")

    assert call_program(program, "p") == 143
    assert cleaned == ["closed"]
    assert capsys.readouterr().err == "p: terminated; the same command continues\n"
    assert signal.getsignal(signal.SIGTERM) is before


def test_bugs_keep_their_traceback():
    for bug in (RecursionError(), ZeroDivisionError(), RuntimeError("it was allocated twice")):
        with pytest.raises(type(bug)):
            call_program(Mock(side_effect=bug), "p")


def test_a_program_runs_in_a_thread_too():
    codes = []
    thread = threading.Thread(target=lambda: codes.append(call_program(lambda: None, "p")))
    thread.start()
    thread.join()
    assert codes == [0]
