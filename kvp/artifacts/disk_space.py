"""Whether the disk of an output folder has space for what will be written."""

from __future__ import annotations

import shutil

from rich.filesize import decimal

from kvp.artifacts.addresses import ObjectPath, Place
from kvp.errors import StoreError


def check_disk(path: Place, needed: int) -> None:
    """Raise StoreError when the disk that `path` will be on has fewer than `needed` bytes left.

    An object store has no such limit.
    """
    if isinstance(path, ObjectPath):
        return
    folder = path.absolute()
    while not folder.exists():
        folder = folder.parent
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise StoreError(
            f"--out {path}: about {decimal(needed)} to write, {decimal(free)} free on that disk"
        )
