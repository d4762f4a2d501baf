"""Claim an output folder: one writer, and only runs of the same identity resume.

A folder must be new, empty, or of the same kind and identity (all that decides its content); one
with anything else in it is refused, untouched. One process writes it, or the workers of one job.

The system drops a `flock` when its process ends, however it ends: a lock file without a lock means
nothing. An object store has no locks: one in this user's cache folder keeps processes of this
machine apart. On disks and in object stores the file that marks a folder is created exclusively: of
programs that begin one folder at once, only those with the identity written in it continue.
"""

from __future__ import annotations

import fcntl
import os
import re
import socket
import time
import weakref
from collections.abc import Mapping
from contextlib import AbstractContextManager, suppress
from copy import deepcopy
from dataclasses import dataclass
from functools import reduce
from pathlib import Path
from shutil import rmtree
from tempfile import mkdtemp
from typing import Any

from kvp.artifacts.addresses import ObjectPath, Place, files_below
from kvp.artifacts.files import CLAIMED, copy_files, is_partial, raising_as, staging_folder
from kvp.artifacts.manifest import Format, differences, read_sealed_json, write_sealed_json
from kvp.errors import KvpError

LOCK = "writer.lock"
"""Held alone by a single writer, shared by workers."""
_SWEEP_SECONDS = 10.0
"""For how long a worker waits where the last one of earlier workers may be deleting leftovers."""


@dataclass(frozen=True, kw_only=True)
class FolderKind:
    """One kind of output folder."""

    noun: str
    """Name of this kind in messages: "trace store"."""
    marker: str
    """File that makes a folder one of this kind and holds its identity; written first."""
    error: type[KvpError]
    format: Format | None = None
    begun: str = r"(?!)"
    """Regular expression of the POSIX paths that an interrupted creation may leave."""
    optional: tuple[str, ...] = ()
    """Entries `part.entry` of the identity, compared only where both sides know them."""

    def read_marker(self, folder: Place) -> dict[str, Any] | None:
        """Content of the marker, None where there is none; raises `error` where it is damaged."""
        path = folder / self.marker
        if not path.exists():
            return None
        read = self.format.read if self.format else read_sealed_json
        content = read(path, self.error)
        with raising_as(path, self.error):
            return {**content, "identity": dict(content.get("identity", {}))}

    def differences(self, marker: Mapping[str, Any], identity: Mapping[str, Any]) -> list[str]:
        """Entries in which a folder with this marker differs from an identity, with both values."""
        sides = deepcopy((dict(marker.get("identity", {})), dict(identity)))
        for *above, name in (path.split(".") for path in self.optional):
            parts = [reduce(lambda part, key: part.get(key, {}), above, side) for side in sides]
            if any(part.get(name) is None for part in parts):
                for part in parts:
                    part.pop(name, None)
        return differences(*sides)


class OutputFolder(AbstractContextManager["OutputFolder"]):
    """A folder that this process writes, until `release` (or the end of a `with` block)."""

    def __init__(self, path: Place, kind: FolderKind, *, shared: bool = False) -> None:
        """Make and lock the folder (`claim` checks whose it is); raises the kind's error."""
        self.path = path
        self.shared = shared
        """Whether this process is one of several workers, which may write it, too."""
        self.existing_marker: dict[str, Any] | None = None
        """Content of the marker when claimed, or at `refresh`; None for a new folder."""
        self._kind = kind
        self._copy: Path | None = None
        here = self._here = path if isinstance(path, Path) else staging_folder(path)
        self._lock = here / LOCK
        try:
            self._made = [folder for folder in (here, *here.parents) if not folder.exists()]
            self._take()
        except OSError as problem:
            raise kind.error(f"cannot write --out {path}: {problem.strerror}") from None
        CLAIMED[here] = self

    def check(self) -> None:
        """Raise the kind's error where a folder on a disk was deleted, moved or replaced since."""
        if self._here == self.path and not self._is_there():
            raise self._kind.error(
                f"--out {self.path} was deleted, moved or replaced meanwhile; repeat the command"
            )

    def _is_there(self) -> bool:
        """Whether the file that is locked is still the one at its path."""
        with suppress(FileNotFoundError, NotADirectoryError):
            return os.path.samestat(os.stat(self._lock), os.fstat(self._handle))
        return False

    def _take(self) -> None:
        """Take the lock; raises the kind's error, naming the holder, where it is taken."""
        mode = fcntl.LOCK_SH if self.shared else fcntl.LOCK_EX
        deadline = time.monotonic() + (_SWEEP_SECONDS if self.shared else 0)
        while True:
            self._here.mkdir(parents=True, exist_ok=True)
            try:
                handle = self._handle = os.open(self._lock, os.O_RDWR | os.O_CREAT, 0o666)
            except FileNotFoundError:  # its last holder has deleted the folder meanwhile
                continue
            self._close = weakref.finalize(self, os.close, handle)
            taken = _locked(handle, mode)
            if taken and os.fstat(handle).st_nlink:  # its last holder may have deleted it
                break
            holder = os.pread(handle, 200, 0).decode(errors="replace").strip()
            self._close()
            if not taken and time.monotonic() >= deadline:
                holder = holder or "another process"
                raise self._kind.error(
                    f"{self.path} is being written by {holder}; wait for it to end"
                )
            time.sleep(0.0 if taken else 0.1)
        os.ftruncate(handle, 0)
        os.pwrite(handle, f"process {os.getpid()} on {socket.gethostname()}\n".encode(), 0)

    @classmethod
    def claim(
        cls, path: Place, kind: FolderKind, identity: Mapping[str, Any], *, shared: bool = False
    ) -> OutputFolder:
        """Make or take over a folder for this process, or for it and other workers (`shared`).

        `identity` holds JSON values; entries that are `optional` may follow by `refresh`. Raises
        the kind's error where another process writes the folder, where it cannot be made, and where
        it is a file, holds something else, or was begun with another identity.
        """
        check_folder(path, kind, identity)
        folder = cls(path, kind, shared=shared)
        try:
            # Another process may have been quicker between the check and the lock.
            folder.existing_marker = check_folder(path, kind, identity)
        except BaseException:
            folder.release()
            raise
        return folder

    def begin(self, content: Mapping[str, Any]) -> bool:
        """Write the marker of a new folder; False, or the kind's error, where it has one."""
        created = write_sealed_json(self.path / self._kind.marker, content, new=True)
        self.refresh(content["identity"])
        return created

    def refresh(self, identity: Mapping[str, Any]) -> None:
        """Read the marker again and compare it with an identity whose `optional` entries are known.

        Raises the kind's error where they differ: another worker may have begun the folder.
        """
        marker = self.existing_marker = self._kind.read_marker(self.path)
        if marker and (different := self._kind.differences(marker, identity)):
            raise self._kind.error(_refusal_message(self.path, different))

    @property
    def local(self) -> Path:
        """The folder, or a copy on this disk, empty at first, of one elsewhere until `release`."""
        if isinstance(self.path, Path):
            return self.path
        if self._copy is None:
            self._copy = Path(mkdtemp(dir=self._here))
        return self._copy

    def pull(self, *names: str) -> None:
        """Fetch files that are there to `local`, all where none is named; nothing on a disk."""
        if isinstance(self.path, ObjectPath):
            every = names or [name for name, _ in files_below(self.path)]
            copy_files(self.path, self.local, every)

    def push(self, *names: str) -> None:
        """Write files of `local` to where the folder is, in this order; nothing on a disk."""
        if isinstance(self.path, ObjectPath):
            copy_files(self.local, self.path, names)

    def release(self) -> None:
        """Let other writers in; safe to call twice. Removes the folders that it made if they are
        empty; the last writer also deletes half-written files of killed ones.
        """
        if self._copy is not None:
            rmtree(self._copy, ignore_errors=True)
            self._copy = None
        if self._close.alive:
            # Where another folder has taken its place, nothing there is deleted.
            if self._is_there() and _locked(self._handle, fcntl.LOCK_EX):
                for name in [n for n, _ in files_below(self._here) if is_partial(n)]:
                    (self._here / name).unlink(missing_ok=True)
                for copy in [] if self._here == self.path else self._here.iterdir():
                    rmtree(copy, ignore_errors=True)
                self._lock.unlink(missing_ok=True)
            self._close()
        CLAIMED.pop(self._here, None)
        for empty in self._made:
            with suppress(OSError):  # something is in it
                empty.rmdir()

    def __exit__(self, *error: object) -> None:
        try:
            if error[0] is None:
                self.check()
        finally:
            self.release()


def _locked(handle: int, mode: int) -> bool:
    """Lock an open file or change its lock; False where others hold it."""
    try:
        fcntl.flock(handle, mode | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def check_folder(
    path: Place, kind: FolderKind, identity: Mapping[str, Any]
) -> dict[str, Any] | None:
    """The marker of a folder, None if it is new or empty; writes nothing.

    Raises the kind's error for a file, for a folder of something else, and for another identity.
    """
    # `exists` is asked before `is_dir`: another worker may make the folder in between.
    if path.exists() and not (isinstance(path, Path) and path.is_dir()):
        raise kind.error(f"--out {path} is a file; name a folder")
    marker = kind.read_marker(path)
    if marker is None:
        names = (name for name, _ in files_below(path) if name != LOCK and not is_partial(name))
        stray = next((name for name in names if not re.fullmatch(kind.begun, name)), None)
        if stray is None:
            return None
        marker = kind.read_marker(path)  # another worker may have begun the folder meanwhile
        if marker is None:
            raise kind.error(
                f"--out {path} is not empty and not a {kind.noun} ({stray}); name another"
            )
    if different := kind.differences(marker, identity):
        raise kind.error(_refusal_message(path, different))
    return marker


def _refusal_message(path: Place, different: list[str]) -> str:
    return (
        f"--out {path} was begun with other settings ({'; '.join(different[:3])}); "
        "repeat those to continue it, or name a new folder"
    )
