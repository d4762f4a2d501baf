"""The directory a store is written to: whose it is, who writes, what an ended writer left."""

from __future__ import annotations

import fcntl
import os
import socket
from pathlib import Path

from kvp.errors import StoreError
from kvp.store.paths import LOCK, MANIFEST, OUTPUT, SEQUENCES
from kvp.store.schema import ARRAYS


def refuse_foreign(store: Path) -> None:
    """Raise StoreError unless `store` is absent, empty or the start of an interrupted creation."""
    if store.exists() and not store.is_dir():
        raise StoreError(f"{store} is a file; choose another --out")
    if (store / MANIFEST).exists():
        raise StoreError(f"{store} already holds a trace store; resume it or choose another --out")
    begun = {"zarr.json", LOCK, OUTPUT, f"{MANIFEST}.partial"}
    for path in store.rglob("*") if store.exists() else ():
        inside = path.relative_to(store).parts
        ours = inside[0] in (*ARRAYS, SEQUENCES) and len(inside) <= 2
        if path.is_dir() and ours:
            continue
        if path.name in begun or (ours and path.name.endswith(".partial")):
            continue
        raise StoreError(f"{store} is not empty and not a trace store; choose another --out")


def lock_store(store: Path) -> int:
    """Lock the store for this process, or raise StoreError naming who holds it.

    The operating system drops the lock when its process ends, however it ends, so there is no stale
    lock to take over; the file itself stays and means nothing.
    """
    handle = os.open(store / LOCK, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        holder = os.read(handle, 200).decode(errors="replace").strip() or "another process"
        os.close(handle)
        raise StoreError(f"{store} is being written by {holder}") from None
    except OSError as problem:
        os.close(handle)
        raise StoreError(f"{store} cannot be locked: {problem.strerror}") from None
    os.ftruncate(handle, 0)
    os.write(handle, f"process {os.getpid()} on {socket.gethostname()}\n".encode())
    return handle


def sweep(store: Path) -> None:
    """Delete files a killed writer left half-written. Only for the holder of the lock."""
    for folder in (store, store / SEQUENCES, *(store / array for array in ARRAYS)):
        for partial in folder.glob("*.partial"):
            partial.unlink()
