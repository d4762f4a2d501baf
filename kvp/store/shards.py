"""What a shard may expand to, checked before anything is decompressed.

A shard holds one chunk per KV head (docs/formats.md): Blosc frames, each followed by its CRC-32C,
and at the end an index of their offsets and sizes. A frame says in its header how many bytes it
expands to; a foreign one may say anything, and a few kilobytes of zeros can stand for gigabytes.
"""

from __future__ import annotations

import math
import os
from pathlib import Path

import numpy as np

from kvp.errors import StoreError
from kvp.store.schema import DTYPES
from kvp.store.store_plan import StorePlan

_CHECKSUM_BYTES = 4
_HEADER_BYTES = 16
_EXPANDED = slice(4, 8)
"""Bytes of a Blosc header that say how large the frame is when decompressed."""
_ABSENT = np.uint64(2**64 - 1)


def check_chunks(shard: Path, plan: StorePlan, array: str) -> None:
    """Raise StoreError unless every chunk of a shard expands to exactly what the plan says.

    Reads the index and one header per KV head. Raises OSError as `open` does.
    """
    heads = plan.geometry.total_kv_heads
    chunk_bytes = math.prod(plan.shape(array)[2:]) * DTYPES[plan.dtype_of(array)][0].itemsize
    size = shard.stat().st_size
    index_bytes = 16 * heads + _CHECKSUM_BYTES
    if size < index_bytes:
        raise StoreError(f"{shard} is damaged: too short for the {heads} KV heads of its plan")
    with shard.open("rb") as stream:
        stream.seek(-index_bytes, os.SEEK_END)
        # [L * H, 2] uint64: offset and size of every chunk
        chunks = np.frombuffer(stream.read(16 * heads), dtype="<u8").reshape(heads, 2)
        for offset, length in chunks:
            if offset == _ABSENT or int(offset) + int(length) > size:
                raise StoreError(f"{shard} is damaged: its index points outside of it")
            stream.seek(int(offset))
            header = stream.read(_HEADER_BYTES)
            if int.from_bytes(header[_EXPANDED], "little") != chunk_bytes:
                raise StoreError(
                    f"{shard} is damaged: a chunk does not expand to the {chunk_bytes} bytes of "
                    "its plan"
                )
