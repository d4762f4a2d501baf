"""How programs end: codes, and one line for what the user can mend."""

from __future__ import annotations

import errno
import os
import signal
import threading

import pytest

from kvp.errors import StoreError, guarded


def _raise(error: BaseException) -> None:
    raise error


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
def test_what_the_user_can_mend_is_one_line(
    error: BaseException, code: int, line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert guarded(lambda: _raise(error), "p") == code
    assert capsys.readouterr().err == line + "\n"


def test_sigterm_ends_with_143_and_the_earlier_handler_returns(
    capsys: pytest.CaptureFixture[str],
) -> None:
    before = signal.getsignal(signal.SIGTERM)
    cleaned = []

    def program() -> None:
        try:
            os.kill(os.getpid(), signal.SIGTERM)
        except Exception:  # what a broad handler on the way would do
            cleaned.append("swallowed")
        finally:
            cleaned.append("closed")

    assert guarded(program, "p") == 143
    assert cleaned == ["closed"]
    assert capsys.readouterr().err == "p: terminated; the same command continues\n"
    assert signal.getsignal(signal.SIGTERM) is before


def test_bugs_keep_their_traceback() -> None:
    def endless() -> None:
        endless()

    with pytest.raises(RecursionError):
        guarded(endless, "p")
    with pytest.raises(ZeroDivisionError):
        guarded(lambda: 1 / 0, "p")


def test_a_program_runs_in_a_thread_too() -> None:
    codes: list[int] = []
    thread = threading.Thread(target=lambda: codes.append(guarded(lambda: None, "p")))
    thread.start()
    thread.join()
    assert codes == [0]
