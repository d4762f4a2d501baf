"""Locks of a folder in an object store, which knows no `flock`: leases, kept alive by a heartbeat.

Every process that writes has one object, `workers/ID.STATE.lock`, which a thread writes anew every
few seconds. A lock is an object that names such a process, made only where there is none
(`If-None-Match`) and taken over, as long as nobody else was quicker (`If-Match`), when the process
it names has not written its own for `KVP_LEASE_SECONDS` by the server's clock. So a killed process
blocks nothing for longer, and no clock but the server's counts. A process that was stopped for
longer than that may do a piece of work that another does, too: its content is a function of its
number, so the second one writes the same again (docs/decisions.md#object-stores).
"""

from __future__ import annotations

import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import datetime, timedelta

from kvp.artifacts.addresses import ObjectPath
from kvp.artifacts.locks import CLAIMS, TURN, WORKERS
from kvp.artifacts.objects import ObjectFacts
from kvp.errors import AddressError, KvpError

LEASE_VARIABLE = "KVP_LEASE_SECONDS"
_LEASE_SECONDS = 60.0
_BEATS = 4
"""Heartbeats within the time of a lease."""
_WAITING, _ALONE, _SHARED = "waiting", "alone", "shared"


def lease_seconds() -> float:
    """Seconds until a process that does not write its lease counts as dead."""
    text = os.environ.get(LEASE_VARIABLE, str(_LEASE_SECONDS))
    try:
        return max(float(text), 1.0)
    except ValueError:
        raise AddressError(f"{LEASE_VARIABLE} is no number of seconds: {text!r}") from None


class PieceLease:
    """A lock on one piece of work, held until `release`."""

    def __init__(self, folder: FolderLease, path: ObjectPath) -> None:
        """Made by `FolderLease.piece`."""
        self._folder = folder
        self._path = path

    def release(self) -> None:
        """Let others in; safe to call twice."""
        self._folder.drop(self._path)


class FolderLease:
    """What `kvp.artifacts.locks.FolderLock` is for a local folder, for one in an object store."""

    def __init__(self, folder: ObjectPath, error: type[KvpError], *, shared: bool = False) -> None:
        """Take the folder; waits for the lease of a dead process to end.

        Raises `error`, naming the holder, where another process is at work that this one cannot
        share the folder with, and AddressError where the store cannot be asked.
        """
        self.shared = shared
        self.pause_seconds = min(1.0, lease_seconds() / 10)
        """Between two looks at what other workers are doing."""
        self._folder = folder
        self._error = error
        self._heart = _Heart(folder)
        self._held: set[ObjectPath] = set()
        self._guard = threading.RLock()
        self._in_turn = False
        try:
            if shared and not self._heart.is_told_apart():
                raise error(
                    f"{folder}: this server ignores conditional writes (If-None-Match), by which "
                    "workers share work out; start one process per folder"
                )
            self._begin_turn()
            self.first = self._admit()
            """Whether no other worker was at work."""
        except BaseException:
            self._leave()
            raise
        if not shared:
            self.end_turn()

    def end_turn(self) -> None:
        """Let other workers have their turn; safe to call twice."""
        if self._in_turn:
            self._in_turn = False
            self.drop(self._folder / TURN)

    @contextmanager
    def turn(self) -> Iterator[None]:
        """What is done in the block, no other worker does meanwhile."""
        assert not self._in_turn, "turns do not nest"
        if self.shared:
            self._begin_turn()
        try:
            yield
        finally:
            self.end_turn()

    def piece(self, number: int) -> PieceLease | None:
        """The lock of one piece of work; None while another worker does it."""
        path = self._folder / CLAIMS / f"{number:06d}.lock"
        return PieceLease(self, path) if self._take(path) else None

    def in_use(self, name: str) -> bool:
        """Whether a lock file, a POSIX path in the folder, is of a process that lives."""
        if name == TURN:
            return True
        if name.startswith(f"{WORKERS}/"):
            return self._lives(name.removeprefix(f"{WORKERS}/").partition(".")[0])
        return self._lives(self._holder(self._folder / name))

    def release(self, last: Callable[[], None] = lambda: None) -> None:
        """Let others in; the last worker calls `last` before. Safe to call twice.

        Where the store does not answer any more, the lease ends by itself.
        """
        if not self._heart.beats:
            return
        if self._heart.in_time:
            with suppress(AddressError):
                self.end_turn()
                if self.shared:
                    with self.turn():
                        if not self._others(_SHARED):
                            last()
        self._leave()

    def drop(self, path: ObjectPath) -> None:
        """Delete a lock that this process holds; safe to call twice."""
        with self._guard:
            if path not in self._held:
                return
            self._held.remove(path)
        if self._heart.in_time:  # otherwise it may be another's by now
            path.unlink()

    def _leave(self) -> None:
        """End the heartbeat and delete what is held."""
        with suppress(AddressError):
            for path in [*self._held]:
                self.drop(path)
        self._heart.stop()

    def _begin_turn(self) -> None:
        while not self._take(self._folder / TURN):
            time.sleep(self.pause_seconds / 2)
        self._in_turn = True

    def _admit(self) -> bool:
        """Become a writer, in the turn; whether no other worker is at work."""
        refused_by = _ALONE if self.shared else ""
        known: dict[str, datetime] = {}
        while others := self._others(refused_by):
            for name, facts in others.items():
                if known.setdefault(name, facts.modified) != facts.modified:
                    who = _text(self._folder / WORKERS / name)
                    raise self._error(
                        f"{self._folder} is being written by {who}; wait for it to end"
                    )
            time.sleep(self.pause_seconds)
        first = not self._others(_SHARED)
        self._heart.become(_SHARED if self.shared else _ALONE)
        return first

    def _others(self, state: str) -> dict[str, ObjectFacts]:
        """Names of the lease objects of other writers that live, of one state or of any."""
        return {
            name: facts
            for name, facts in self._heart.living().items()
            if not name.startswith(self._heart.id)
            and (name.split(".")[1] == state if state else name.split(".")[1] != _WAITING)
        }

    def _lives(self, worker: str) -> bool:
        return any(name.startswith(f"{worker}.") for name in self._heart.living())

    def _holder(self, path: ObjectPath) -> str:
        """Id of the process that a lock names."""
        return _text(path).partition(" ")[0]

    def _take(self, path: ObjectPath) -> bool:
        """Make a lock, or take it over from a dead process; False while another has it."""
        objects, content = path.objects, f"{self._heart.id} {_self()}\n".encode()
        with self._guard:
            if path in self._held:
                return False
            taken = objects.write_if(path.key, content, None)
            # Facts before content: what is overwritten then is what was read, or nothing is.
            if not taken and (there := path.facts) is not None:
                holder = self._holder(path)
                taken = holder == self._heart.id or (  # its own where an answer was lost
                    not self._lives(holder) and objects.write_if(path.key, content, there)
                )
            if taken:
                self._held.add(path)
            return taken


class _Heart:
    """The lease object of this process, written anew by a thread, and those of others."""

    def __init__(self, folder: ObjectPath) -> None:
        """Write the first one, in the state `waiting`; AddressError where that fails."""
        self.id = secrets.token_hex(8)
        self._folder = folder / WORKERS
        self._seconds = lease_seconds()
        self._state = _WAITING
        self._stopped = threading.Event()
        self._writing = threading.Lock()
        self.beat()
        self._thread = threading.Thread(target=self._run, name="lease", daemon=True)
        self._thread.start()

    @property
    def beats(self) -> bool:
        """Whether it has not been stopped."""
        return not self._stopped.is_set()

    @property
    def in_time(self) -> bool:
        """Whether others still take this process for a living one."""
        return time.monotonic() - self._beaten < self._seconds

    def beat(self) -> None:
        """Write the lease, and learn what time it is on the server."""
        with self._writing:
            if not self.beats:
                return
            path = self._path
            started = time.monotonic()
            path.write_bytes(f"{_self()}\n{secrets.token_hex(4)}\n".encode())
            facts = path.facts
            if facts is not None:
                self._beaten, self._time = started, facts.modified

    def is_told_apart(self) -> bool:
        """Whether the server refuses to make an object that is there."""
        return not self._path.objects.write_if(self._path.key, b"", None)

    def become(self, state: str) -> None:
        """Go on under the name of another state."""
        before = self._path
        self._state = state
        self.beat()
        before.unlink()

    def living(self) -> dict[str, ObjectFacts]:
        """Lease objects by name, `ID.STATE.lock`, that were written lately enough."""
        start = len(self._folder.key) + 1
        listed = [*self._folder.objects.listed(self._folder.key)]
        now = self._time + timedelta(seconds=time.monotonic() - self._beaten)
        oldest = now - timedelta(seconds=self._seconds + 1)  # times are whole seconds
        return {each.key[start:]: each for each in listed if each.modified >= oldest}

    def stop(self) -> None:
        """End the thread and delete the lease, where the store answers; safe to call twice."""
        self._stopped.set()
        self._thread.join(timeout=5)
        if self.in_time:
            with suppress(AddressError):
                self._path.unlink()

    @property
    def _path(self) -> ObjectPath:
        return self._folder / f"{self.id}.{self._state}.lock"

    def _run(self) -> None:
        while not self._stopped.wait(self._seconds / _BEATS):
            with suppress(AddressError):  # the next request that matters says so
                self.beat()


def _self() -> str:
    return f"process {os.getpid()} on {socket.gethostname()}"


def _text(path: ObjectPath) -> str:
    """First line of a lock or lease; nothing where it is gone."""
    try:
        return path.read_text(errors="replace").partition("\n")[0]
    except FileNotFoundError:
        return ""
