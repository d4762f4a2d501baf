"""The lock of an output folder: one process writes alone, or the workers of one job together.

The system drops a `flock` when its process ends, however it ends: a lock file without a lock means
nothing. An object store knows no locks; one in the cache of this user keeps processes of this
machine apart.
"""

from __future__ import annotations

import fcntl
import os
import socket
import time
import weakref
from collections.abc import Callable
from pathlib import Path

from kvp.artifacts.addresses import Place
from kvp.artifacts.copies import staging_folder
from kvp.errors import KvpError

LOCK = "writer.lock"
"""Held alone by a single writer, shared by workers."""
_SWEEP_SECONDS = 10.0
"""For how long a worker waits where the last one of earlier workers may be deleting leftovers."""


class FolderLock:
    """The lock of a folder, held until `release` or the end of the process."""

    def __init__(self, folder: Place, error: type[KvpError], *, shared: bool = False) -> None:
        """Take it, with `shared` beside other workers.

        Raises `error`, naming the holder, where another process has it, and where a local folder
        cannot be locked.
        """
        here = folder / LOCK if isinstance(folder, Path) else staging_folder(folder)
        self._path = here.with_suffix(".lock")
        mode = fcntl.LOCK_SH if shared else fcntl.LOCK_EX
        deadline = time.monotonic() + (_SWEEP_SECONDS if shared else 0)
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            while (handle := self._taken(mode)) is None and time.monotonic() < deadline:
                time.sleep(0.1)
            if handle is None:
                raise error(f"{folder} is being written by {self._holder()}; wait for it to end")
            self._handle, self._close = handle, weakref.finalize(self, os.close, handle)
            os.ftruncate(handle, 0)
            os.pwrite(handle, f"process {os.getpid()} on {socket.gethostname()}\n".encode(), 0)
        except OSError as problem:
            raise error(f"{folder} cannot be locked: {problem.strerror}") from None

    def release(self, last: Callable[[], None] = lambda: None) -> None:
        """Let others in; who leaves last calls `last` before. Safe to call twice."""
        if self._close.alive:
            if _locked(self._handle, fcntl.LOCK_EX):
                last()
                self._path.unlink(missing_ok=True)
            self._close()

    def _holder(self) -> str:
        """What the holder wrote into the file."""
        try:
            return self._path.read_text(errors="replace").strip() or "another process"
        except FileNotFoundError:
            return "another process"

    def _taken(self, mode: int) -> int | None:
        """A handle that holds the lock; None where another process has it."""
        while True:
            handle = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o666)
            try:
                taken = _locked(handle, mode)
                if taken and os.fstat(handle).st_nlink:
                    return handle
            except BaseException:
                os.close(handle)
                raise
            os.close(handle)
            if not taken:
                return None
            # Its last holder deleted the file meanwhile.


def _locked(handle: int, mode: int) -> bool:
    """Lock an open file or change its lock; False where others hold it."""
    try:
        fcntl.flock(handle, mode | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
