"""A small store, made from seeds alone."""

import pytest

from kvp.geometry import Geometry
from kvp.store import StorePlan, TraceWriter


@pytest.fixture(scope="session")
def plan():
    geometry = Geometry(layers=2, query_heads=4, kv_heads=2, head_dim=4)
    return StorePlan(geometry=geometry, dtype="bfloat16", max_tokens=24, sequences=3)


@pytest.fixture(scope="session")
def manifest():
    return {"identity": {"seed": 0, "data": {"length": 16, "tasks": ["a", "b"]}}, "note": "test"}


@pytest.fixture
def store(tmp_path, plan, manifest, make_trace):
    """Sequences 0 and 2 of three."""
    path = tmp_path / "store"
    with TraceWriter.create_or_resume(path, plan, manifest) as writer:
        for index in (2, 0):
            writer.write(make_trace(plan, index))
    return path
