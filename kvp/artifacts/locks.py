"""Locks of a folder: one process writes, or the workers of one job write together.

The operating system drops a lock when its process ends, however it ends, so there is no stale lock
to take over: a lock file without a lock has no effect. On a network file system that holds where
its locks (`flock`) reach all machines and end with theirs (docs/scaling.md).
"""

from __future__ import annotations

import fcntl
import os
import re
import socket
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from kvp.errors import KvpError

LOCK = "writer.lock"
"""Held alone by a single writer, shared by workers as long as they are at work."""
TURN = "turn.lock"
"""Held by the one worker that changes what belongs to all of them."""
CLAIMS = "claims"
"""Folder of locks, one per piece of work that a worker is doing."""
WORKERS = "workers"
"""Folder of leases, one per process that writes; in object stores only (`kvp.artifacts.leases`)."""
_LOCK_FILE = re.compile(rf"{LOCK}|{TURN}|{CLAIMS}/\d+\.lock|{WORKERS}/\w+\.\w+\.lock")


def is_lock(name: str) -> bool:
    """Whether a POSIX path inside a folder is that of a lock file."""
    return _LOCK_FILE.fullmatch(name) is not None


class FileLock:
    """A lock on a file made for it, held until `release` or the end of the process."""

    def __init__(self, path: Path, handle: int) -> None:
        """Made by `take`; `handle` is the open file that holds the lock."""
        self.path = path
        self.handle = handle
        self._close = weakref.finalize(self, os.close, handle)

    @classmethod
    def take(cls, path: Path, *, shared: bool = False, wait: bool = False) -> FileLock | None:
        """Lock a file, alone or shared; None where another holds it and this one does not `wait`.

        Raises OSError where the file cannot be made or locked.
        """
        mode = (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | (0 if wait else fcntl.LOCK_NB)
        while True:
            handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
            try:
                fcntl.flock(handle, mode)
                # Its last holder may have deleted it meanwhile.
                if path.exists() and path.stat().st_ino == os.fstat(handle).st_ino:
                    return cls(path, handle)
            except BlockingIOError:
                os.close(handle)
                return None
            except FileNotFoundError:  # deleted between the two looks at it
                pass
            except BaseException:
                os.close(handle)
                raise
            os.close(handle)

    def share(self) -> bool:
        """Turn a lock held alone into a shared one; False, and released, if another was quicker."""
        try:
            fcntl.flock(self.handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            self._close()
            return False
        return True

    def alone(self) -> bool:
        """Turn a shared lock into one held alone; False where others hold it, too.

        The lock may be lost then: only for a worker that is about to end.
        """
        try:
            fcntl.flock(self.handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def release(self, *, delete: bool = True) -> None:
        """Let others in, and delete the file; safe to call twice."""
        if self._close.alive:
            if delete:
                self.path.unlink(missing_ok=True)
            self._close()

    @property
    def held(self) -> bool:
        """Whether it has not been released."""
        return self._close.alive


class FolderLock:
    """The lock of a local folder that exists, held until `release` or the end of the process.

    With `shared`, other workers may hold it as well. A new one has its turn (`turn`) already, until
    `end_turn`, so that it can prepare the folder before others come.
    """

    pause_seconds = 0.2
    """Between two looks at what other workers are doing."""

    def __init__(self, folder: Path, error: type[KvpError], *, shared: bool = False) -> None:
        """Take the lock; raises `error`, naming the holder, where another process has it."""
        self.shared = shared
        self._folder = folder
        self._turn: FileLock | None = None
        path = folder / LOCK
        try:
            if shared:
                self._turn = FileLock.take(folder / TURN, wait=True)
            lock = FileLock.take(path)
            self.first = lock is not None
            """Whether no other worker was at work."""
            if shared and lock is None:
                lock = FileLock.take(path, shared=True)
            elif shared and lock is not None and not lock.share():
                lock = None
        except OSError as problem:
            self.end_turn()
            raise error(f"{folder} cannot be locked: {problem.strerror}") from None
        if lock is None:
            self.end_turn()
            raise error(f"{folder} is being written by {_holder(path)}; wait for it to end")
        self._lock = lock
        os.ftruncate(lock.handle, 0)
        os.pwrite(lock.handle, f"process {os.getpid()} on {socket.gethostname()}\n".encode(), 0)

    def end_turn(self) -> None:
        """Let other workers have their turn; safe to call twice."""
        if self._turn is not None:
            self._turn.release()
        self._turn = None

    @contextmanager
    def turn(self) -> Iterator[None]:
        """What is done in the block, no other worker does meanwhile."""
        assert self._turn is None, "turns do not nest"
        if self.shared:
            self._turn = FileLock.take(self._folder / TURN, wait=True)
        try:
            yield
        finally:
            self.end_turn()

    def in_use(self, name: str) -> bool:
        """Whether a lock file, a POSIX path in the folder, is needed by who sweeps the folder."""
        return name in (LOCK, TURN)

    def piece(self, number: int) -> FileLock | None:
        """The lock of one piece of work; None while another worker does it."""
        path = self._folder / CLAIMS / f"{number:06d}.lock"
        path.parent.mkdir(exist_ok=True)
        return FileLock.take(path)

    def release(self, last: Callable[[], None] = lambda: None) -> None:
        """Let others in; the last worker calls `last` before. Safe to call twice."""
        if not self._lock.held:
            return
        if not self.shared:
            self._lock.release()
            return
        self.end_turn()
        with suppress(FileNotFoundError), self.turn():  # somebody may have deleted the folder
            alone = self._lock.alone()
            if alone:
                last()
            self._lock.release(delete=alone)
        self._lock.release(delete=False)


def _holder(path: Path) -> str:
    """What the holder of a lock wrote into it."""
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip() or "another process"
    except OSError:
        return "another process"
