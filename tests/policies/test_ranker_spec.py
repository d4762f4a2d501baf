"""What rankers are made of: features by hand, every bad value named, files of earlier versions."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
import torch

from kvp.geometry import Geometry
from policies.ranker import RankerSpec, position_features

FOURIER = RankerSpec(head_dim=8, hidden=12, position_width=6, frequencies=5, reference_length=64)
PAPER = RankerSpec(head_dim=8, hidden=12, position_width=6, max_positions=40, architecture="paper")
SMALLER = replace(FOURIER, inputs=("key", "distance"), blocks=1)
GEOMETRY = Geometry(layers=2, query_heads=4, kv_heads=2, head_dim=8)
every = pytest.mark.parametrize(
    "spec", [FOURIER, PAPER, SMALLER], ids=["fourier", "paper", "smaller"]
)


def test_fourier_features_by_hand() -> None:
    """Two frequencies: wavelengths 4 and 8; position 2 of 9 tokens."""
    spec = RankerSpec(head_dim=8, frequencies=2, reference_length=8)
    features = position_features(spec, torch.tensor([2]), 9)[0]
    log9 = np.log(9)
    expected = [0.25, np.log(3) / log9, np.log(7) / log9, 0.0, 1.0, -1.0, 0.0]
    torch.testing.assert_close(
        features, torch.tensor(expected, dtype=torch.float32), atol=1e-6, rtol=0
    )


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ({"architecture": "tree"}, "unknown architecture 'tree'"),
        ({"hidden": 0}, "hidden of a ranker must be a positive integer, got 0"),
        ({"hidden": 2.5}, "hidden of a ranker must be a positive integer, got 2.5"),
        ({"frequencies": True}, "frequencies of a ranker must be a positive integer, got True"),
        ({"blocks": 3}, "blocks of a ranker must be 1 or 2, got 3"),
        ({"blocks": 0}, "blocks of a ranker must be a positive integer, got 0"),
        ({"inputs": ()}, "inputs of a ranker cannot be empty: choose from key, value, position"),
        ({"inputs": ("key", "query")}, "unknown input 'query' of a ranker: choose key, value"),
        ({"inputs": ("key", "key")}, "inputs of a ranker are named once each, got key, key"),
        ({"architecture": "paper", "inputs": ("key",)}, "always key, value, position, got key"),
        ({"architecture": "paper", "neighbours": 3}, "need the fourier architecture"),
        ({"neighbours": -1}, r"neighbours of a ranker must be an integer in 0\.\.1024"),
    ],
)
def test_bad_specs_are_value_errors(bad: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        RankerSpec(head_dim=8, **bad)


@every
def test_specs_round_trip(spec: RankerSpec) -> None:
    text = json.dumps(spec.to_dict())
    assert json.loads(text) == spec.to_dict()
    again = RankerSpec.from_dict(json.loads(text))
    assert again == spec
    assert hash(again) == hash(spec)
    assert spec.features


def test_inputs_have_one_order() -> None:
    spec = replace(FOURIER, inputs=("distance", "key"))
    assert spec == replace(FOURIER, inputs=("key", "distance"))
    assert spec.inputs == ("key", "distance")
