"""A shard: all of one sequence of an array, made in memory; how shards are read.

A shard holds one chunk per KV head (docs/formats.md): Blosc frames, each followed by its CRC-32C,
and at the end an index of their offsets and sizes with a CRC-32C of its own. zarr writes shards;
readers take the heads that they need, check both CRCs, and that the sequence's record has them.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np
import zarr
from numcodecs import blosc
from numcodecs.checksum32 import CRC32C
from zarr.codecs import BloscCodec, Crc32cCodec
from zarr.core.buffer import Buffer
from zarr.storage import MemoryStore

from kvp.artifacts.addresses import Place, read_ranges, size_of
from kvp.store.schema import DTYPES, StorePlan, is_label

_CRC = CRC32C()


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
    compressor = BloscCodec(
        cname="zstd", clevel=1, shuffle="shuffle", typesize=itemsize, blocksize=1 << 20
    )
    return {
        "shape": (plan.sequences, *shape),
        "dtype": DTYPES[dtype][1],
        "shards": (1, *shape),
        "chunks": (1, 1, 1, *shape[2:]),
        "compressors": [compressor, Crc32cCodec()],
        "fill_value": 0,
        "dimension_names": axes,
        "chunk_key_encoding": {"name": "default", "separator": "."},
        "attributes": {"kvp_dtype": dtype},
    }


def encoded_shard(plan: StorePlan, array: str, index: int, values: np.ndarray[Any, Any]) -> bytes:
    """The shard of one padded sequence of an array, as zarr writes it."""
    objects: dict[str, Buffer] = {}
    array_in_memory = zarr.create_array(store=MemoryStore(objects), **array_settings(plan, array))
    # Empty chunks are written out: zarr takes -0.0 for empty and would return +0.0.
    array_in_memory.with_config({"write_empty_chunks": True})[index] = values
    return objects[shard_name(array, index)].to_bytes()


def checksums(shard: bytes, plan: StorePlan) -> str:
    """The CRC-32C of every chunk of a shard, 8 hex digits each, as they stand in it."""
    return "".join(shard[stop - 4 : stop].hex() for _, stop in _spans(shard, plan))


def read_chunks(
    path: Place, plan: StorePlan, array: str, heads: range, expected: str
) -> Iterator[np.ndarray[Any, Any]]:
    """The chunks of some KV heads of a shard, padded, one after the other.

    `expected` are its `checksums`. FileNotFoundError where it is missing or empty, ValueError or
    RuntimeError where a chunk is damaged, or is not the one that belongs there.
    """
    end, length = size_of(path) or 0, _index_bytes(plan)
    if end < length:
        raise FileNotFoundError(f"{path} does not exist, or is cut off")
    (tail,) = read_ranges(path, [(end - length, end)])
    spans = _spans(tail, plan)[heads.start : heads.stop]
    dtype, shape = np.dtype(DTYPES[plan.dtype_of(array)][1]), plan.shape(array)[2:]
    for head, chunk in zip(heads, read_ranges(path, spans), strict=True):
        frame = _CRC.decode(chunk)
        if chunk[-4:].hex() != expected[8 * head : 8 * head + 8]:
            raise ValueError("it holds what belongs elsewhere")
        yield np.frombuffer(blosc.decompress(frame), dtype).reshape(shape)


def _index_bytes(plan: StorePlan) -> int:
    return 16 * plan.geometry.total_kv_heads + 4


def _spans(shard: bytes, plan: StorePlan) -> list[tuple[int, int]]:
    """[start, stop) of every chunk, by the index at the end of a shard."""
    index = np.frombuffer(_CRC.decode(shard[-_index_bytes(plan) :]), "<u8")
    return [(start, start + size) for start, size in index.reshape(-1, 2).tolist()]
