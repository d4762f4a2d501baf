"""A shard: all of one sequence of an array, made in memory; how shards are read.

A shard holds one chunk per KV head (docs/formats.md): Blosc frames, each followed by its CRC-32C,
and at the end an index of their offsets and sizes with a CRC-32C of its own. zarr checks both
whenever it reads them, so that every flipped bit of a shard is an error.
"""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import zarr
from zarr.abc.store import ByteRequest, Store, SuffixByteRequest
from zarr.codecs import BloscCodec, Crc32cCodec
from zarr.core.buffer import Buffer, BufferPrototype
from zarr.storage import LocalStore, MemoryStore, WrapperStore

from kvp.artifacts.addresses import ObjectPath, Patience, Place, one_line_errors
from kvp.store.schema import DTYPES, StorePlan, is_label


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


def open_array(store: Place, plan: StorePlan, array: str) -> zarr.Array[Any]:
    """The array that a plan describes, read-only; on an object store by ranges of bytes.

    Where some heads are read, only their chunks and the index are. ValueError for another array.
    """
    folder = store / array
    files = folder.zarr_store() if isinstance(folder, ObjectPath) else LocalStore(folder)
    found = zarr.open_array(store=Shards(files, folder), mode="r", zarr_format=3)
    expected = zarr.create_array(store=MemoryStore(), **array_settings(plan, array))
    if found.metadata.to_dict() != expected.metadata.to_dict():
        raise ValueError(f"{folder / 'zarr.json'} describes another array than the store's plan")
    return found


class Shards(WrapperStore[Store]):
    """A folder of shards, whose indices are read once.

    Raises FileNotFoundError for a shard that is missing or empty (zarr would read zeros),
    AddressError where an object store cannot be asked.
    """

    def __init__(self, store: Store, folder: Place) -> None:
        """`store` is the folder of an array."""
        super().__init__(store)
        self._folder = folder
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
        return found

    def _with_store(self, store: Store) -> Shards:
        """The same folder, opened in another way."""
        return Shards(store, self._folder)

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
