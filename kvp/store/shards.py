"""A shard: all of one sequence of an array, made in memory, and checked before it is decompressed.

A shard holds one chunk per KV head (docs/formats.md): Blosc frames, each followed by its CRC-32C,
and at the end an index of their offsets and sizes. A frame says in its header how many bytes it
expands to; a foreign one may say anything, and a few kilobytes of zeros can stand for gigabytes.
"""

from __future__ import annotations

import asyncio
import math
from typing import Any

import numpy as np
import zarr
from zarr.abc.store import ByteRequest, RangeByteRequest, Store, SuffixByteRequest
from zarr.core.buffer import Buffer, BufferPrototype
from zarr.storage import LocalStore, MemoryStore, WrapperStore

from kvp.artifacts.addresses import ObjectPath, Place
from kvp.artifacts.objects import Patience, told
from kvp.errors import StoreError
from kvp.store.paths import array_settings, shard_name
from kvp.store.schema import DTYPES
from kvp.store.store_plan import StorePlan

_CHECKSUM_BYTES = 4
_EXPANDED = slice(4, 8)
"""Bytes of a Blosc header that say how large the frame is when decompressed."""
_ABSENT = np.uint64(2**64 - 1)


def encoded_shard(plan: StorePlan, array: str, index: int, values: np.ndarray[Any, Any]) -> bytes:
    """The shard of one padded sequence of an array, as zarr writes it."""
    objects: dict[str, Buffer] = {}
    made = zarr.create_array(store=MemoryStore(objects), **array_settings(plan, array))
    # Empty chunks are written out: zarr takes -0.0 for empty and would return +0.0.
    made.with_config({"write_empty_chunks": True})[index] = values
    return objects[shard_name(array, index)].to_bytes()


def open_array(store: Place, plan: StorePlan, array: str) -> zarr.Array[Any]:
    """An array of a store, read-only and checked; on an object store by ranges of bytes.

    Where some heads are read, only their chunks and the index are.
    """
    folder = store / array
    files = folder.zarr_store() if isinstance(folder, ObjectPath) else LocalStore(folder)
    checked = CheckedShards(files, folder, plan, array)
    return zarr.open_array(store=checked, mode="r", zarr_format=3)


class CheckedShards(WrapperStore[Store]):
    """A folder of shards; what is read of them expands to exactly what the plan says.

    Raises StoreError, naming the shard, for another size and for an index that points outside of
    it, FileNotFoundError for a shard that is missing (zarr would read zeros), AddressError where an
    object store cannot be asked.
    """

    def __init__(self, store: Store, folder: Place, plan: StorePlan, array: str) -> None:
        """`store` is the folder of an array."""
        super().__init__(store)
        self._folder = folder
        self._plan = plan
        self._array = array
        self._heads = plan.geometry.total_kv_heads
        shape, dtype = plan.shape(array), DTYPES[plan.dtype_of(array)][0]
        self._chunk_bytes = math.prod(shape[2:]) * dtype.itemsize
        self._indices: dict[str, Buffer] = {}
        """The index of every shard that was read in part."""

    async def get(
        self, key: str, prototype: BufferPrototype, byte_range: ByteRequest | None = None
    ) -> Buffer | None:
        """As zarr's stores."""
        if not key.startswith("c."):
            return await self._fetched(key, prototype, byte_range)
        indexed = isinstance(byte_range, SuffixByteRequest)
        if indexed and key in self._indices:
            return self._indices[key]
        found = await self._fetched(key, prototype, byte_range)
        if found is None:
            raise FileNotFoundError(f"{self._folder / key} does not exist")
        shard, content = self._folder / key, found.to_bytes()
        if isinstance(byte_range, RangeByteRequest):
            self._check_frame(shard, content, byte_range.end - byte_range.start)
        else:
            size = None if indexed else len(content)
            for offset, length in self._chunks(shard, content, size):
                if not indexed:
                    self._check_frame(shard, content[offset : offset + length], length)
        if indexed:
            self._indices[key] = found
        return found

    def _with_store(self, store: Store) -> CheckedShards:
        """The same folder, opened in another way."""
        return CheckedShards(store, self._folder, self._plan, self._array)

    async def _fetched(
        self, key: str, prototype: BufferPrototype, byte_range: ByteRequest | None
    ) -> Buffer | None:
        if not isinstance(self._folder, ObjectPath):
            return await self._store.get(key, prototype, byte_range)
        patience = Patience()
        with told(str(self._folder / key)):
            while True:
                try:
                    return await self._store.get(key, prototype, byte_range)
                except Exception as problem:
                    await asyncio.sleep(patience.pause(problem))

    def _chunks(self, shard: Place, content: bytes, size: int | None) -> list[tuple[int, int]]:
        """Offset and size of every chunk, by the index at the end of `content`."""
        index_bytes = 16 * self._heads + _CHECKSUM_BYTES
        if len(content) < index_bytes:
            raise StoreError(
                f"{shard} is damaged: too short for the {self._heads} KV heads of its plan"
            )
        index = content[-index_bytes:-_CHECKSUM_BYTES]
        chunks = np.frombuffer(index, dtype="<u8").reshape(self._heads, 2)
        for offset, length in chunks:
            if offset == _ABSENT or (size is not None and int(offset) + int(length) > size):
                raise StoreError(f"{shard} is damaged: its index points outside of it")
        return [(int(offset), int(length)) for offset, length in chunks]

    def _check_frame(self, shard: Place, frame: bytes, length: int) -> None:
        """Raise StoreError unless a chunk is there as a whole and expands to what the plan says."""
        if len(frame) != length:
            raise StoreError(f"{shard} is damaged: its index points outside of it")
        if int.from_bytes(frame[_EXPANDED], "little") != self._chunk_bytes:
            raise StoreError(
                f"{shard} is damaged: a chunk does not expand to the {self._chunk_bytes} bytes of "
                "its plan"
            )
