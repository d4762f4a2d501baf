from __future__ import annotations

import pytest

from kvp.geometry import Geometry

QWEN = Geometry(layers=28, query_heads=28, kv_heads=4, head_dim=128)


def test_derived_sizes_and_round_trip() -> None:
    assert QWEN.group == 7
    assert QWEN.total_kv_heads == 112
    assert Geometry.from_dict(QWEN.to_dict()) == QWEN
    assert str(QWEN) == "28 layers x 4 KV heads (28 query heads, head_dim 128)"


def test_layers_of_a_model_that_are_not_its_first_ones() -> None:
    some = Geometry(layers=2, query_heads=4, kv_heads=2, head_dim=8, layer_indices=(2, 5))
    assert tuple(some.model_layers) == (2, 5)
    assert some.total_kv_heads == 4
    assert str(some) == "2 layers x 2 KV heads (4 query heads, head_dim 8, layers 2, 5)"
    data = some.to_dict()
    assert data["layer_indices"] == [2, 5]
    assert Geometry.from_dict(data) == some


def test_a_geometry_of_all_layers_is_written_as_before() -> None:
    """Files of earlier versions know no layer indices."""
    first = Geometry(layers=2, query_heads=4, kv_heads=2, head_dim=8, layer_indices=(0, 1))
    assert first == Geometry.from_dict(
        {"layers": 2, "query_heads": 4, "kv_heads": 2, "head_dim": 8}
    )
    assert "layer_indices" not in first.to_dict()
    assert tuple(first.model_layers) == (0, 1)


@pytest.mark.parametrize("indices", [(1,), (2, 1), (1, 1), (-1, 2), (0, 1, 2)])
def test_layer_indices_that_cannot_be_are_refused(indices: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="cannot be layers"):
        Geometry(layers=2, query_heads=4, kv_heads=2, head_dim=8, layer_indices=indices)


def test_impossible_geometries_are_refused() -> None:
    with pytest.raises(ValueError, match="evenly"):
        Geometry(layers=1, query_heads=3, kv_heads=2, head_dim=8)
    with pytest.raises(ValueError, match="positive"):
        Geometry(layers=0, query_heads=2, kv_heads=2, head_dim=8)
    with pytest.raises(TypeError):
        Geometry.from_dict({**QWEN.to_dict(), "experts": 8})
