"""How fast tensors go into and out of a store here, measured on a store in RAM."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
import zarr
from zarr.storage import MemoryStore

from kvp.geometry import Geometry
from kvp.store.paths import array_settings
from kvp.store.store_plan import StorePlan

_BYTES = 2**25
"""Bytes of the measured sequence, about."""
_ROUNDS = 3


def measured_codec_rates(
    geometry: Geometry, *, dtype: str, tokens: int, clock: Callable[[], float]
) -> tuple[float, float]:
    """Raw bytes per second of keys written to and read from a store of this shape and dtype.

    Files and disks are left out: what packs and unpacks is slower.
    """
    itemsize = torch.empty(0, dtype=getattr(torch, dtype)).element_size()
    per_head = itemsize * tokens * geometry.head_dim
    layers = max(1, min(geometry.layers, _BYTES // (per_head * geometry.kv_heads)))
    shape = replace(geometry, layers=layers, layer_indices=())
    plan = StorePlan(geometry=shape, dtype=dtype, max_tokens=tokens, sequences=_ROUNDS + 1)
    keys = torch.randn(layers, geometry.kv_heads, tokens, geometry.head_dim)
    stored = keys.to(getattr(torch, dtype))
    content = (stored.view(torch.uint16) if dtype == "bfloat16" else stored).numpy()
    array = zarr.create_array(store=MemoryStore(), **array_settings(plan, "k"))
    written, read = [], []
    for index in range(_ROUNDS + 1):
        start = clock()
        array[index] = content
        middle = clock()
        array[index]
        written.append(middle - start)
        read.append(clock() - middle)
    seconds = [max(min(times[1:]), 1e-9) for times in (written, read)]
    return content.nbytes / seconds[0], content.nbytes / seconds[1]
