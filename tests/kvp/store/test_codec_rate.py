"""Rates of the codec are raw bytes over the seconds of the clock that is given."""

from __future__ import annotations

import itertools

import pytest

from kvp.geometry import Geometry
from kvp.store.codec_rate import measured_codec_rates


@pytest.mark.parametrize(("dtype", "itemsize"), [("float32", 4), ("bfloat16", 2)])
def test_bytes_over_seconds(dtype: str, itemsize: int) -> None:
    seconds = itertools.count(0, 5)
    geometry = Geometry(layers=3, query_heads=4, kv_heads=2, head_dim=8)
    write, read = measured_codec_rates(
        geometry, dtype=dtype, tokens=40, clock=lambda: float(next(seconds))
    )
    assert write == read == 3 * 2 * 40 * 8 * (2 + 2) * itemsize / 5
