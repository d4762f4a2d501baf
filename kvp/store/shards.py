"""A shard: all of one sequence of an array, made in memory; how shards are read.

A shard holds one chunk per KV head (docs/formats.md): Blosc frames, each followed by its CRC-32C,
and at the end an index of their offsets and sizes with a CRC-32C of its own. zarr checks both
whenever it reads them, so that every flipped bit of a shard is an error. Before that `Shards` looks
whether a chunk is the one that the sequence's record names, and of the size that it may have.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import zarr
from zarr.abc.store import ByteRequest, RangeByteRequest, Store, SuffixByteRequest
from zarr.codecs import BloscCodec, Crc32cCodec
from zarr.core.buffer import Buffer, BufferPrototype
from zarr.storage import LocalStore, MemoryStore, WrapperStore

from kvp.artifacts.addresses import ObjectPath, Patience, Place, one_line_errors
from kvp.store.schema import DTYPES, StorePlan, is_label


Checksums = dict[str, str]
"""Array -> the CRC-32C of every chunk of its shard, 8 hex digits each, as they stand in it."""
_ABSENT = 2**64 - 1
"""Offset of a chunk that was not written."""


def shard_name(array: str, index: int) -> str:
    """Name of the file that holds one sequence of an array."""
    axes = {"q": 6}.get(array, 4 if is_label(array) else 5)
    return ".".join(["c", str(index), *["0"] * (axes - 1)])


def shard_path(store: Place, array: str, index: int) -> Place:
    """File that holds one sequence of an array."""
    return store / array / shard_name(array, index)


def array_settings(plan: StorePlan, array: str) -> dict[str, Any]:
    """Arguments of `zarr.create_array` for one array of a store."""
    shape = plan.shape(array)
    dtype = plan.dtype_of(array)
    itemsize = DTYPES[dtype][0].itemsize
    axes = ["sequence", "layer", "kv_head", *(["group"] if array == "q" else []), "token"]
    axes += [] if is_label(array) else ["head_dim"]
    blosc = BloscCodec(
        cname="zstd", clevel=1, shuffle="shuffle", typesize=itemsize, blocksize=1 << 20
    )
    return {
        "shape": (plan.sequences, *shape),
        "dtype": DTYPES[dtype][1],
        "shards": (1, *shape),
        "chunks": (1, 1, 1, *shape[2:]),
        "compressors": [blosc, Crc32cCodec()],
        "fill_value": 0,
        "dimension_names": axes,
        "chunk_key_encoding": {"name": "default", "separator": "."},
        "attributes": {"kvp_dtype": dtype},
    }


def encoded_shard(plan: StorePlan, array: str, index: int, values: np.ndarray[Any, Any]) -> bytes:
    """The shard of one padded sequence of an array, as zarr writes it."""
    objects: dict[str, Buffer] = {}
    made = zarr.create_array(store=MemoryStore(objects), **array_settings(plan, array))
    # Empty chunks are written out: zarr takes -0.0 for empty and would return +0.0.
    made.with_config({"write_empty_chunks": True})[index] = values
    return objects[shard_name(array, index)].to_bytes()


def checksums(shard: bytes, plan: StorePlan) -> str:
    """Of every chunk of a shard, as `Checksums` has them."""
    spans = _index(shard, plan)
    return "".join(shard[start + size - 4 : start + size].hex() for start, size in spans)


def _index(shard: Any, plan: StorePlan) -> list[list[int]]:  # noqa: ANN401 - anything with bytes
    """Offset and bytes of every chunk of a shard, or of its last bytes; ValueError if not there."""
    chunks = plan.geometry.total_kv_heads
    index = np.frombuffer(shard, np.uint8)[-16 * chunks - 4 : -4].view("<u8")
    if len(index) < 2 * chunks or _ABSENT in index:
        raise ValueError("it lacks chunks")
    found: list[list[int]] = index.reshape(-1, 2).tolist()
    return found


def open_array(
    store: Place, plan: StorePlan, array: str, expected: Callable[[int], Checksums]
) -> zarr.Array[Any]:
    """The array that a plan describes, read-only; on an object store by ranges of bytes.

    Where some heads are read, only their chunks and the index are. `expected` gives the checksums
    of a sequence, empty where there are none. ValueError for another array.
    """
    folder = store / array
    files = folder.zarr_store() if isinstance(folder, ObjectPath) else LocalStore(folder)
    shards = Shards(files, folder, plan, expected)
    found = zarr.open_array(store=shards, mode="r", zarr_format=3)
    expected = zarr.create_array(store=MemoryStore(), **array_settings(plan, array))
    if found.metadata.to_dict() != expected.metadata.to_dict():
        raise ValueError(f"{folder / 'zarr.json'} describes another array than the store's plan")
    return found


class Shards(WrapperStore[Store]):
    """A folder of shards, whose indices are read once.

    Raises FileNotFoundError for a shard that is missing or empty (zarr would read zeros),
    AddressError where an object store cannot be asked, ValueError where a chunk is not `expected`
    there or claims a size that is not the plan's, before it is decompressed.
    """

    def __init__(
        self, store: Store, folder: Place, plan: StorePlan, expected: Callable[[int], Checksums]
    ) -> None:
        """`store` is the folder of an array."""
        super().__init__(store)
        self._folder, self._plan, self._expected = folder, plan, expected
        self._indices: dict[str, Buffer] = {}
        """The index of every shard that was read in part."""

    async def get(
        self, key: str, prototype: BufferPrototype, byte_range: ByteRequest | None = None
    ) -> Buffer | None:
        """As zarr's stores."""
        indexed = isinstance(byte_range, SuffixByteRequest)
        if indexed and key in self._indices:
            return self._indices[key]
        found = await self._fetched(key, prototype, byte_range)
        if key.startswith("c.") and (found is None or len(found) == 0):
            raise FileNotFoundError(f"{self._folder / key} does not exist, or is empty")
        if found is not None and indexed:
            self._indices[key] = found
        if found is not None and key.startswith("c."):
            self._check(key, found, byte_range)
        return found

    def _check(self, key: str, found: Buffer, asked: ByteRequest | None) -> None:
        """Raise ValueError unless the chunks in some bytes of a shard are those that belong there.

        `asked` is None for the whole shard; else the bytes are its index, or one chunk.
        """
        content, array = found.as_numpy_array(), self._folder.name
        spans = _index(content if asked is None else self._indices[key].as_numpy_array(), self._plan)
        if isinstance(asked, SuffixByteRequest):
            return
        size = math.prod(self._plan.shape(array)[2:])
        size *= DTYPES[self._plan.dtype_of(array)][0].itemsize
        expected = self._expected(int(key.split(".")[1])).get(array)
        for number, (start, length) in enumerate(spans):
            if isinstance(asked, RangeByteRequest) and start != asked.start:
                continue
            chunk = content[start : start + length] if asked is None else content
            if int.from_bytes(chunk[4:8].tobytes(), "little") != size:
                raise ValueError(f"a chunk is not of {size} bytes")
            crc = chunk[-4:].tobytes().hex()
            if expected is not None and crc != expected[8 * number : 8 * number + 8]:
                raise ValueError("it holds what belongs elsewhere")

    def _with_store(self, store: Store) -> Shards:
        """The same folder, opened in another way."""
        return Shards(store, self._folder, self._plan, self._expected)

    async def _fetched(
        self, key: str, prototype: BufferPrototype, byte_range: ByteRequest | None
    ) -> Buffer | None:
        if not isinstance(self._folder, ObjectPath):
            return await self._store.get(key, prototype, byte_range)
        patience = Patience()
        with one_line_errors(str(self._folder / key)):
            while True:
                try:
                    return await self._store.get(key, prototype, byte_range)
                except Exception as problem:
                    await asyncio.sleep(patience.pause(problem))
