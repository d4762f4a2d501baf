"""How programs end: codes, and one line for what the user can mend."""

import errno
import os
import signal
import subprocess
import sys
import threading

import pytest

from kvp.errors import StoreError, UsageError, call_program


def _raise(error):
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
        (UsageError(f"--out {'a' * 9_000}: no"), 2, f"p: error: --out {'a' * 1_987}"),
        (MemoryError("Unable to allocate 3 TiB"), 2,
         "p: error: out of memory (Unable to allocate 3 TiB)"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried"), 2,
         "p: error: out of memory (DefaultCPUAllocator: can't allocate memory: you tried)"),
        (KeyboardInterrupt(), 130, "p: interrupted; the same command continues"),
    ],
)  # fmt: skip
def test_what_the_user_can_mend_is_one_line(error, code, line, capsys):
    assert call_program(lambda: _raise(error), "p") == code
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
    def endless():
        endless()

    with pytest.raises(RecursionError):
        call_program(endless, "p")
    with pytest.raises(ZeroDivisionError):
        call_program(lambda: 1 / 0, "p")


def test_a_program_runs_in_a_thread_too():
    codes = []
    thread = threading.Thread(target=lambda: codes.append(call_program(lambda: None, "p")))
    thread.start()
    thread.join()
    assert codes == [0]


_FORKING = """
import multiprocessing, os, signal, sys, time
from kvp.errors import call_program

def program():
    for number in (signal.SIGTERM, signal.SIGINT):
        if not (child := os.fork()):
            try:
                time.sleep(60)
            finally:
                os._exit(1)
        os.kill(child, number)  # at once, or when it sleeps
        assert os.waitpid(child, 0)[1] == number
        time.sleep(0.01)
    with multiprocessing.get_context("fork").Pool(2) as pool:  # its end terminates its processes
        assert list(pool.imap(abs, range(20))) == list(range(20))

sys.exit(max(call_program(program, "p") for _ in range(10)))
"""


def test_signals_end_forks_of_a_program_at_once_and_silently():
    done = subprocess.run(
        [sys.executable, "-c", _FORKING], capture_output=True, text=True, timeout=120, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
