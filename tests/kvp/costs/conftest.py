"""A small plan that can be counted by hand."""

from __future__ import annotations

import pytest

from kvp.costs import Lengths, ModelSize, Plan, RankerSize, Rates, TrainingSize
from kvp.geometry import Geometry

MODEL = ModelSize(
    geometry=Geometry(layers=2, query_heads=4, kv_heads=2, head_dim=8),
    layers=2,
    parameters=1000,
    layer_parameters=400,
    head_parameters=100,
    hidden=16,
    intermediate=32,
)
TRAINING = TrainingSize(
    steps=10,
    contexts=2,
    prompt_weight=1.0,
    context_weight=0.0,
    uniform_weight=0.0,
    validate_every=5,
    validation_contexts=3,
    calibration_contexts=0,
    memory_bytes=1e9,
)
PLAN = Plan(
    model=MODEL,
    dtype="float32",
    lengths=Lengths(prompt=90, answer=10),
    max_tokens=100,
    train=20,
    validation=4,
    ranker=RankerSize(parameters=50, products=40, token_bytes=64, update_flops=1000.0),
    training=TRAINING,
    buffer=20,
    traced=20,
    points=1,
    grid=4,
)
FREE = 1e30
"""A rate at which work costs no time."""


@pytest.fixture
def plan() -> Plan:
    return PLAN


@pytest.fixture
def free() -> Rates:
    """Nothing takes time; tests give one rate at a time."""
    return Rates(
        source="assumed: no work takes time",
        accelerator=False,
        prompt_flops=FREE,
        decode_layer_seconds=0.0,
        decode_step_seconds=0.0,
        pairs=FREE,
        grid_pairs=FREE,
        ranker_flops=FREE,
        write_bytes=FREE,
        read_bytes=FREE,
        write_importance_bytes=FREE,
        read_grid_bytes=FREE,
        copy_bytes=FREE,
    )
