"""Claim an output folder: one writer, and only runs of the same identity resume.

The same four rules hold for every program that writes a folder. It must be new, empty, or of the
same kind and identity (all that decides its content); a folder with anything else in it is refused,
untouched. It must not lie inside another artefact. One process writes it at a time, or several
workers that share it and all take the same rules. All this holds in an object store, too
(`kvp.artifacts.leases`). What an interrupted writer left half-written
(`*.partial` of the files a folder of the kind holds) is deleted by the next one, or by the last
worker.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from types import TracebackType
from typing import Any

from kvp.artifacts.addresses import ObjectPath, Place, files_below
from kvp.artifacts.copies import fetch, send
from kvp.artifacts.files import PARTIAL
from kvp.artifacts.leases import FolderLease, PieceLease
from kvp.artifacts.locks import CLAIMS, FileLock, FolderLock, is_lock
from kvp.errors import KvpError
from kvp.manifest import differences, read_json, read_sealed_json

_MARKERS = ("manifest.json", "policy.json", "run.json")
"""Files that make a folder an artefact."""


@dataclass(frozen=True, kw_only=True)
class FolderKind:
    """One kind of output folder."""

    noun: str
    """Name of this kind in messages: "trace store"."""
    marker: str
    """File that makes a folder one of this kind and holds its identity; written first."""
    error: type[KvpError]
    """Raised when a folder is refused."""
    format: str | None = None
    """Value of the marker's entry "format"; None where it has none."""
    begun: str = r"(?!)"
    """Regular expression of the files, as POSIX paths inside the folder, that an interrupted
    creation may leave without a marker."""
    files: str = r"(?!)"
    """Regular expression of the files, as POSIX paths inside the folder, that its writers write
    aside as `*.partial`; the marker always is."""
    read: Callable[[Place], Mapping[str, Any]] | None = None
    """Reads the content of a marker, its entry "identity" among it; sealed JSON as a rule."""
    optional: tuple[str, ...] = ()
    """Entries of the identity that are compared only where both sides have them: programs know
    them only when the model is loaded."""

    def left_over(self, name: str) -> bool:
        """Whether an interrupted writer leaves a file of this name, a POSIX path in the folder."""
        whole = name.removesuffix(PARTIAL)
        if whole == name:
            return is_lock(name)
        return whole == self.marker or re.fullmatch(self.files, whole) is not None

    def read_marker(self, folder: Place) -> dict[str, Any] | None:
        """Content of the marker, None where there is none; raises `error` where it is damaged."""
        path = folder / self.marker
        if not path.exists():
            return None
        try:
            if self.format not in (None, read_json(path, self.error).get("format")):
                raise self.error(f"{path} does not belong to a {self.noun}; name a new folder")
            return dict(self.read(path) if self.read else read_sealed_json(path, self.error))
        except self.error:
            if not path.exists():  # a worker is beginning the folder anew
                return None
            raise

    def differences(self, marker: Mapping[str, Any], identity: Mapping[str, Any]) -> list[str]:
        """Entries in which a folder with this marker differs from an identity, with both values."""
        theirs, ours = dict(marker["identity"]), dict(identity)
        for name in self.optional:
            if name not in theirs or name not in ours:
                theirs.pop(name, None)
                ours.pop(name, None)
        return differences(theirs, ours)


def _never(_: Place) -> bool:
    return False


class OutputFolder:
    """A folder that this process writes, until `release` (or the end of a `with` block)."""

    def __init__(
        self,
        path: Place,
        kind: FolderKind,
        lock: FolderLock | FolderLease,
        identity: Mapping[str, Any],
        made: Sequence[Path] = (),
    ) -> None:
        """Made by `claim`; `made` are the folders that it had to make, innermost first."""
        self.path = path
        self.existing_marker: dict[str, Any] | None = None
        """Content of the marker when the folder was claimed; None for a new folder."""
        self._kind = kind
        self._lock = lock
        self._identity = identity
        self._made = made
        self._copy: TemporaryDirectory[str] | None = None

    @classmethod
    def claim(
        cls,
        path: Place,
        kind: FolderKind,
        identity: Mapping[str, Any],
        *,
        replaceable: Callable[[Place], bool] = _never,
        shared: bool = False,
    ) -> OutputFolder:
        """Make or take over a folder for this process.

        With `shared`, other workers may write it, too, and the one that claims it has its turn
        (`turn`) until it calls `end_turn`: in it the first one prepares the folder.

        Args:
            path: the folder.
            kind: kind of folder that it becomes.
            identity: JSON values; `optional` ones may be left to `require`.
            replaceable: whether a folder of another identity holds nothing to keep; it then
                counts as new, unless other workers are at work in it.
            shared: whether this process is one of several workers.

        Raises:
            KvpError: the kind's error, in one line: a file, another kind or identity, inside
                another artefact, being written by another process, or it cannot be made.
        """
        refusal = check_folder(path, kind, identity, replaceable=replaceable)
        if refusal:
            raise kind.error(refusal)
        lock, made = _locked(path, kind, shared=shared)
        folder = cls(path, kind, lock, identity, made)
        if not lock.first:
            replaceable = _never
        # Another process may have been quicker between the check and the lock.
        if refusal := check_folder(path, kind, identity, replaceable=replaceable):
            folder.release()
            raise kind.error(refusal)
        marker = kind.read_marker(path)
        if marker is None or not kind.differences(marker, identity):
            folder.existing_marker = marker
        if lock.first:
            _sweep(path, kind, lock)
        return folder

    @property
    def shared(self) -> bool:
        """Whether other workers may write it, too."""
        return self._lock.shared

    @property
    def first(self) -> bool:
        """Whether no other worker was at work when this one claimed it."""
        return self._lock.first

    def end_turn(self) -> None:
        """Let other workers have their turn, after `claim`; safe to call twice."""
        self._lock.end_turn()

    @contextmanager
    def turn(self) -> Iterator[None]:
        """What is done in the block, no other worker does meanwhile; `existing_marker` is fresh.

        Raises the kind's error where another worker has begun the folder with other settings.
        """
        with self._lock.turn():
            if self.shared:
                marker = self.existing_marker = self._kind.read_marker(self.path)
                if marker and (different := self._kind.differences(marker, self._identity)):
                    raise self._kind.error(_others(self.path, different))
            yield

    @property
    def pause_seconds(self) -> float:
        """Between two looks at what other workers are doing."""
        return self._lock.pause_seconds

    def piece(self, number: int) -> FileLock | PieceLease | None:
        """The lock of one piece of work; None while another worker does it."""
        return self._lock.piece(number)

    def require(self, identity: Mapping[str, Any]) -> None:
        """Compare `optional` entries of the identity, which the claim did not know yet.

        Raises the kind's error where one differs.
        """
        if self.existing_marker is None:
            return
        whole = {**self.existing_marker["identity"], **identity}
        if different := self._kind.differences(self.existing_marker, whole):
            raise self._kind.error(_others(self.path, different))

    @property
    def local(self) -> Path:
        """Where files are written: the folder itself, or a copy on this disk of one elsewhere.

        The copy begins empty (`pull`), is seen by nobody (`push`), and goes with `release`.
        """
        if isinstance(self.path, Path):
            return self.path
        if self._copy is None:
            self._copy = TemporaryDirectory(prefix="kvp-", ignore_cleanup_errors=True)
        return Path(self._copy.name)

    def pull(self, *names: str) -> None:
        """Fetch files to `local`: these or, where none is named, all; nothing on a disk."""
        if isinstance(self.path, ObjectPath):
            fetch(self.path, self.local, names or None)

    def push(self, *names: str) -> None:
        """Write files of `local` to where the folder is, in this order; nothing on a disk."""
        if isinstance(self.path, ObjectPath):
            send(self.local, self.path, names)

    def release(self) -> None:
        """Let other writers in; a folder made for nothing goes. Safe to call twice.

        The last of several workers deletes what killed ones left.
        """
        if self._copy is not None:
            self._copy.cleanup()
            self._copy = None
        self._lock.release(lambda: _sweep(self.path, self._kind, self._lock))
        for empty in self._made:
            _remove_empty(empty)

    def __enter__(self) -> OutputFolder:
        """Return itself."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Release."""
        self.release()


def _locked(
    path: Place, kind: FolderKind, *, shared: bool
) -> tuple[FolderLock | FolderLease, list[Path]]:
    """Lock a folder, and the folders that had to be made for it; raises the kind's error."""
    if isinstance(path, ObjectPath):
        return FolderLease(path, kind.error, shared=shared), []
    made = [parent for parent in (path, *path.parents) if not parent.exists()]
    try:
        path.mkdir(parents=True, exist_ok=True)
        return FolderLock(path, kind.error, shared=shared), made
    except OSError as problem:
        for empty in made:
            _remove_empty(empty)
        raise kind.error(f"cannot write --out {path}: {problem.strerror}") from None


def check_folder(
    path: Place,
    kind: FolderKind,
    identity: Mapping[str, Any],
    *,
    replaceable: Callable[[Place], bool] = _never,
) -> str | None:
    """Say in one line why `OutputFolder.claim` would refuse a folder; None if it would not.

    Touches nothing, so that a program can refuse before it loads a model. Raises the kind's error
    on a damaged marker.
    """
    if (path.exists() and not path.is_dir()) or (isinstance(path, ObjectPath) and path.exists()):
        return f"--out {path} is a file; name a folder"
    for parent in path.absolute().parents:
        if _is_artefact(parent):
            return f"--out {path} lies inside {parent}, which kvp wrote; name a folder elsewhere"
    marker = kind.read_marker(path)
    if marker is None:
        if (foreign := _foreign(path, kind)) is None:
            return None
        return f"--out {path} is not empty and not a {kind.noun} ({foreign}); name another"
    if (different := kind.differences(marker, identity)) and not replaceable(path):
        return _others(path, different)
    return None


def _others(path: Place, different: list[str]) -> str:
    return (
        f"--out {path} was begun with other settings ({'; '.join(different[:3])}); "
        "repeat those to continue it, or name a new folder"
    )


def _foreign(path: Place, kind: FolderKind) -> str | None:
    """A file that no interrupted writer of this kind left, None if there is none.

    Files may come and go meanwhile, where workers begin the folder.
    """
    if isinstance(path, ObjectPath):
        names = (name for name, _ in files_below(path))
        return next((name for name in names if not _known(name, kind)), None)
    for folder, folders, files in os.walk(path):
        folders.sort()
        for entry in (Path(folder, name) for name in sorted((*folders, *files))):
            if (name := _foreign_name(path, entry, kind)) is not None:
                return name
    return None


def _foreign_name(path: Path, entry: Path, kind: FolderKind) -> str | None:
    """Path of an entry in the folder, None where an interrupted writer may have left it."""
    name = entry.relative_to(path).as_posix()
    if not entry.is_dir() or entry.is_symlink():
        return None if _known(name, kind) or not os.path.lexists(entry) else name
    if name == CLAIMS or re.fullmatch(kind.begun, f"{name}/"):
        return None
    with suppress(FileNotFoundError):
        return None if any(entry.iterdir()) else name
    return None


def _known(name: str, kind: FolderKind) -> bool:
    """Whether an interrupted writer may have left a file of this name."""
    return re.fullmatch(kind.begun, name) is not None or kind.left_over(name)


def _is_artefact(folder: Place) -> bool:
    """Whether a folder is one that kvp wrote."""
    for marker in _MARKERS:
        path = folder / marker
        if not path.is_file():
            continue
        if marker == "run.json":
            return (folder / "checkpoints").is_dir() or (folder / "policy.json").exists()
        try:
            if str(read_json(path, KvpError).get("format", "")).startswith("kvp-"):
                return True
        except KvpError:
            continue
    return False


def _sweep(folder: Place, kind: FolderKind, lock: FolderLock | FolderLease) -> None:
    """Delete half-written files of the kind and locks of dead processes, and nothing else.

    Only for the holder of the lock, or for the one worker that is there, in its turn.
    """
    for name, _ in [*files_below(folder)]:
        if kind.left_over(name) and not (is_lock(name) and lock.in_use(name)):
            (folder / name).unlink(missing_ok=True)
    if isinstance(folder, Path):
        _remove_empty(folder / CLAIMS)


def _remove_empty(folder: Path) -> None:
    if folder.is_dir() and not any(folder.iterdir()):
        folder.rmdir()
