"""Ways to damage a file, each a pure function of its bytes and a random state."""

from __future__ import annotations

import random
import shutil
from pathlib import Path


def flip_bit(data: bytes, draw: random.Random) -> bytes:
    """One bit turned over."""
    index = draw.randrange(len(data))
    return data[:index] + bytes([data[index] ^ 1 << draw.randrange(8)]) + data[index + 1 :]


def truncate(data: bytes, draw: random.Random) -> bytes:
    """The beginning only."""
    return data[: draw.randrange(len(data))]


def zero_block(data: bytes, draw: random.Random) -> bytes:
    """A block of zeros, as a file system may leave after a crash."""
    start = draw.randrange(len(data))
    length = min(draw.randrange(1, 512), len(data) - start)
    return data[:start] + bytes(length) + data[start + length :]


def repeat_line(data: bytes, draw: random.Random) -> bytes:
    """A line written twice (of binary data, a block)."""
    lines = data.splitlines(keepends=True)
    index = draw.randrange(len(lines))
    return b"".join([*lines[: index + 1], *lines[index:]])


DAMAGES = {
    "bit": flip_bit,
    "bit again": flip_bit,
    "truncated": truncate,
    "zeros": zero_block,
    "repeated": repeat_line,
}


def damaged_copy(source: Path, target: Path, file: Path, kind: str, draw: random.Random) -> bool:
    """Copy the folder `source` to `target` with one file damaged; whether anything changed."""
    shutil.copytree(source, target)
    path = target / file
    before = path.read_bytes()
    after = DAMAGES[kind](before, draw) if before else b"\x00"
    path.write_bytes(after)
    return after != before


def files_below(folder: Path) -> list[Path]:
    """Every file of a folder, relative to it."""
    return sorted(path.relative_to(folder) for path in folder.rglob("*") if path.is_file())
