"""A folder's lock: one process writes, a second one gets an error that names the first.

The operating system drops the lock when its process ends, however it ends, so there is no stale
lock to take over: a lock file without a lock has no effect.
"""

from __future__ import annotations

import fcntl
import os
import socket
import weakref
from pathlib import Path

from kvp.errors import KvpError

LOCK = "writer.lock"


class FolderLock:
    """The lock of a folder that exists, held until `release` or the end of the process."""

    def __init__(self, folder: Path, error: type[KvpError]) -> None:
        """Take the lock; raises `error`, naming the holder, where another process has it."""
        self._path = folder / LOCK
        while (handle := self._locked(error)) is None:
            pass
        self._close = weakref.finalize(self, os.close, handle)

    def release(self) -> None:
        """Delete the lock file and let others in; safe to call twice."""
        if self._close.alive:
            self._path.unlink(missing_ok=True)
            self._close()

    def _locked(self, error: type[KvpError]) -> int | None:
        """A locked file, None where its last holder deleted it meanwhile."""
        folder = self._path.parent
        handle = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.read(handle, 200).decode(errors="replace").strip() or "another process"
            os.close(handle)
            raise error(f"{folder} is being written by {holder}; wait for it to end") from None
        except OSError as problem:
            os.close(handle)
            raise error(f"{folder} cannot be locked: {problem.strerror}") from None
        if not self._path.exists() or self._path.stat().st_ino != os.fstat(handle).st_ino:
            os.close(handle)
            return None
        os.ftruncate(handle, 0)
        os.pwrite(handle, f"process {os.getpid()} on {socket.gethostname()}\n".encode(), 0)
        return handle
