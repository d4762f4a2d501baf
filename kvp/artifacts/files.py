"""Atomic writing of a file: after any crash it has its old or its whole new content.

Written aside under a name of its own, flushed to the disk, renamed, and the folder flushed as well:
of two writers of one path the later one wins. Files are made as `open` makes them, so the user's
umask decides who may read them. In an object store one request writes a file, as a whole. Imports
no torch.
"""

from __future__ import annotations

import os
import re
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from kvp.artifacts.addresses import ObjectPath, Place

_PARTIAL = re.compile(r".+\.[0-9a-f]{8}\.partial", re.DOTALL)


def partial_of(path: Path) -> Path:
    """Where to write new content of a file: beside it, under another name each time."""
    return path.with_name(f"{path.name}.{secrets.token_hex(4)}.partial")


def is_partial(name: str) -> bool:
    """Whether a file of this name, or path, is not complete."""
    return _PARTIAL.fullmatch(name) is not None


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield the path to write the new content to; it takes the place of `path` at the end.

    When the block fails, the old file stays and what was written is deleted.
    """
    partial = partial_of(path)
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
