"""Files written atomically, and copied between this disk and an object store.

After any crash a file has its old or its whole new content.

Written aside under a name of its own, flushed to the disk, renamed, and the folder flushed as well:
of two writers of one path the later one wins. Files are made as `open` makes them, so the user's
umask decides who may read them. In an object store one request writes a file, as a whole.

Artefacts of many small files (policies, checkpoints, results) are made in a folder on this disk and
sent when they are whole, and fetched before they are read; trace stores are read and written where
they lie. Imports no torch.
"""

from __future__ import annotations

import os
import re
import secrets
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from hashlib import sha256
from pathlib import Path

from kvp.artifacts.addresses import ObjectPath, Place, files_below

_PARTIAL = re.compile(r".+\.[0-9a-f]{8}\.partial", re.DOTALL)


def is_partial(name: str) -> bool:
    """Whether a file of this name, or path, is not complete."""
    return _PARTIAL.fullmatch(name) is not None


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield the path to write the new content to; it takes the place of `path` at the end.

    When the block fails, the old file stays and what was written is deleted.
    """
    partial = path.with_name(f"{path.name}.{secrets.token_hex(4)}.partial")
    with naming(path):
        try:
            yield partial
            sync_path(partial)
            partial.replace(path)
        except BaseException:
            partial.unlink(missing_ok=True)
            raise
        sync_path(path.parent)


@contextmanager
def naming(path: Place) -> Iterator[None]:
    """Name the file in an OSError of the block: a write to a full disk does not say where."""
    try:
        yield
    except OSError as problem:
        raise OSError(problem.errno, problem.strerror or str(problem), str(path)) from problem


def atomic_write_bytes(path: Place, content: bytes) -> None:
    """Write a file as a whole; where that fails the old one stays.

    Raises OSError, in an object store AddressError.
    """
    if isinstance(path, ObjectPath):
        path.write_bytes(content)
        return
    with replacing(path) as partial:
        partial.write_bytes(content)


def atomic_write_text(path: Place, content: str) -> None:
    """`atomic_write_bytes` for text, in UTF-8."""
    atomic_write_bytes(path, content.encode())


def sync_path(path: Path) -> None:
    """Flush a file, or a directory and the names in it, so that it survives a power loss."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def fetch(source: Place, folder: Path, names: Iterable[str] | None = None) -> None:
    """Fetch files, by their POSIX path in `source`: these or all.

    Those that are not there are left out.
    """
    for name in [name for name, _ in files_below(source)] if names is None else names:
        with suppress(FileNotFoundError):
            content = (source / name).read_bytes()
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            atomic_write_bytes(folder / name, content)


def send(folder: Path, target: ObjectPath, names: Iterable[str]) -> None:
    """Write files to an object store in this order, each whole; a folder stands for all in it.

    Those that are not there are left out.
    """
    for name in names:
        if (folder / name).is_dir():
            inner = (f"{name}/{one}" for one, _ in files_below(folder / name))
            send(folder, target, sorted(one for one in inner if not is_partial(one)))
        elif (folder / name).exists():
            atomic_write_bytes(target / name, (folder / name).read_bytes())


def staging_folder(address: Place) -> Path:
    """Where all processes of this user on this machine make what goes to an address."""
    return cache_folder() / "staging" / sha256(str(address.absolute()).encode()).hexdigest()[:16]


def cache_folder() -> Path:
    """Where fetched artefacts are kept: `$XDG_CACHE_HOME/kvp`, by default in `~/.cache`."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "kvp"
