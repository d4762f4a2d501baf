"""Copying files between a folder on this disk and an object store.

Artefacts of many small files (policies, checkpoints, results) are made in a folder on this disk and
sent when they are whole, and fetched before they are read; trace stores are read and written where
they lie. Imports no torch.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from contextlib import suppress
from hashlib import sha256
from pathlib import Path

from kvp.artifacts.addresses import ObjectPath, Place, files_below
from kvp.artifacts.files import atomic_write_bytes, is_partial


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
