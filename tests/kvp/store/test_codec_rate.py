"""Rates of the codec are raw bytes over the seconds of the clock that is given."""

from __future__ import annotations

import itertools

import pytest

from kvp.geometry import Geometry
from kvp.store.codec_rate import measured_codec_rates


@pytest.mark.parametrize(("dtype", "itemsize"), [("float32", 4), ("bfloat16", 2)])
@pytest.mark.parametrize("grid_labels", [1, 3])
def test_bytes_over_seconds(dtype: str, itemsize: int, grid_labels: int) -> None:
    seconds = itertools.count(0, 5)
    geometry = Geometry(layers=3, query_heads=4, kv_heads=2, head_dim=8)
    rates = measured_codec_rates(
        geometry,
        dtype=dtype,
        tokens=40,
        grid=12,
        grid_dtype="float16",
        grid_labels=grid_labels,
        clock=lambda: float(next(seconds)),
    )
    head_tokens = 3 * 2 * 40
    assert rates.write_bytes == rates.read_bytes == head_tokens * 8 * (2 + 2) * itemsize / 5
    grid = head_tokens * (grid_labels * 12 + (3 - grid_labels) * 4) * 2
    assert rates.read_grid_bytes == grid / 5
    assert rates.write_importance_bytes == (head_tokens * 8 * 2 * itemsize + grid) / 5


@pytest.mark.parametrize("tokens", [2, 5])
def test_short_sequences_have_fewer_points_than_the_grid(tokens: int) -> None:
    rates = measured_codec_rates(
        Geometry(layers=1, query_heads=1, kv_heads=1, head_dim=2),
        dtype="float32",
        tokens=tokens,
        grid=48,
        grid_dtype="float32",
        grid_labels=1,
        clock=itertools.count().__next__,
    )
    assert min(rates.read_grid_bytes, rates.write_importance_bytes) > 0
