"""Paths in a trace store and the encoding of its arrays (`docs/formats.md`)."""

from __future__ import annotations

from typing import Any

from zarr.codecs import BloscCodec, Crc32cCodec

from kvp.artifacts.addresses import Place
from kvp.store.importance_grid import root_scale
from kvp.store.schema import DTYPES, GRID_ARRAYS, is_label
from kvp.store.store_plan import StorePlan

MANIFEST = "manifest.json"
SEQUENCES = "sequences"
OUTPUT = "output_gram.safetensors"


def shard_name(array: str, index: int) -> str:
    """Name of the file that holds one sequence of an array."""
    axes = {"q": 6}.get(array, 4 if is_label(array) else 5)
    return ".".join(["c", str(index), *["0"] * (axes - 1)])


def shard_path(store: Place, array: str, index: int) -> Place:
    """File that holds one sequence of an array."""
    return store / array / shard_name(array, index)


def record_path(store: Place, index: int) -> Place:
    """File whose presence commits a sequence."""
    return store / SEQUENCES / f"{index:06d}.json"


def array_settings(plan: StorePlan, array: str) -> dict[str, Any]:
    """Arguments of `zarr.create_array` for one array of a store."""
    shape = plan.shape(array)
    dtype = plan.dtype_of(array)
    itemsize = DTYPES[dtype][0].itemsize
    axes = ["sequence", "layer", "kv_head", *(["group"] if array == "q" else []), "token"]
    axes += [] if is_label(array) else ["head_dim"]
    attributes: dict[str, Any] = {"kvp_dtype": dtype}
    if array in GRID_ARRAYS:
        axes = ["sequence", "layer", "kv_head", "interval", "token"]
        attributes |= {} if dtype == "float32" else {"kvp_root_scale": root_scale(plan.max_tokens)}
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
        "attributes": attributes,
    }
