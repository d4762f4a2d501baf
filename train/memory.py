"""Keep freed memory while training, instead of giving it back to the operating system.

A step on a CPU allocates the activations of all heads and frees them again: some hundred megabytes
in tensors of some megabytes, which glibc maps and unmaps one by one. Touching new pages then takes
up to a quarter of a step (docs/results/speed.md). What is computed does not change. What is left
out: other C libraries, where this does nothing.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
"""Parameters of mallopt (malloc.h)."""
_NEVER = -1
_LARGEST_MAPPED = 2**30
"""Larger blocks are mapped one by one as before, bytes."""
_DEFAULT = 128 * 1024
"""What both parameters are at the start of a program, bytes."""


@contextmanager
def freed_memory_kept() -> Iterator[None]:
    """Let the process keep what is freed inside the block; what is left goes back at its end."""
    libc = _glibc()
    if libc is None:
        yield
        return
    libc.mallopt(_MMAP_THRESHOLD, _LARGEST_MAPPED)
    libc.mallopt(_TRIM_THRESHOLD, _NEVER)
    try:
        yield
    finally:
        libc.mallopt(_MMAP_THRESHOLD, _DEFAULT)
        libc.mallopt(_TRIM_THRESHOLD, _DEFAULT)
        libc.malloc_trim(0)


def _glibc() -> ctypes.CDLL | None:
    """The C library of this process, None where it has no mallopt and malloc_trim."""
    libc = ctypes.CDLL(None)
    return libc if hasattr(libc, "mallopt") and hasattr(libc, "malloc_trim") else None
