from dataclasses import replace

import pytest

from kvp.geometry import Geometry

QWEN = Geometry(layers=28, query_heads=28, kv_heads=4, head_dim=128)


def test_derived_sizes_and_round_trip():
    assert QWEN.group == 7
    assert QWEN.total_kv_heads == 112
    assert Geometry.from_dict(QWEN.to_dict()) == QWEN
    assert str(QWEN) == "28 layers x 4 KV heads (28 query heads, head_dim 128)"


def test_layers_of_a_model_that_are_not_its_first_ones():
    some = Geometry(layers=2, query_heads=4, kv_heads=2, head_dim=8, layer_indices=(2, 5))
    assert tuple(some.model_layers) == (2, 5)
    assert str(some) == "2 layers x 2 KV heads (4 query heads, head_dim 8, layers 2, 5)"
    data = some.to_dict()
    assert data["layer_indices"] == [2, 5]
    assert Geometry.from_dict(data) == some
    first = replace(some, layer_indices=(0, 1))
    assert first == Geometry(layers=2, query_heads=4, kv_heads=2, head_dim=8)
    assert "layer_indices" not in first.to_dict()


@pytest.mark.parametrize(
    ("changed", "message"),
    [({"layer_indices": indices}, "cannot be layers") for indices in
     ((1,), (2, 1), (1, 1), (-1, 2), (0, 1, 2))]
    + [({"query_heads": 3}, "evenly"), ({"layers": 0}, "positive")],
)  # fmt: skip
def test_impossible_geometries_are_refused(changed, message):
    with pytest.raises(ValueError, match=message):
        Geometry(**{"layers": 2, "query_heads": 4, "kv_heads": 2, "head_dim": 8, **changed})
