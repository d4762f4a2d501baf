from __future__ import annotations

import pytest

from kvp.geometry import Geometry

QWEN = Geometry(layers=28, query_heads=28, kv_heads=4, head_dim=128)


def test_derived_sizes_and_round_trip() -> None:
    assert QWEN.group == 7
    assert QWEN.total_kv_heads == 112
    assert Geometry.from_dict(QWEN.to_dict()) == QWEN
    assert str(QWEN) == "28 layers x 4 KV heads (28 query heads, head_dim 128)"


def test_impossible_geometries_are_refused() -> None:
    with pytest.raises(ValueError, match="evenly"):
        Geometry(layers=1, query_heads=3, kv_heads=2, head_dim=8)
    with pytest.raises(ValueError, match="positive"):
        Geometry(layers=0, query_heads=2, kv_heads=2, head_dim=8)
    with pytest.raises(TypeError):
        Geometry.from_dict({**QWEN.to_dict(), "experts": 8})
