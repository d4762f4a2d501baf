from __future__ import annotations

from kvp.geometry import Geometry
from trace_collect.estimate import StoreEstimate


def test_bytes_of_the_papers_model() -> None:
    # 28 layers x 4 KV heads x 128 channels x 2 bytes = 28672 bytes per token for keys alone;
    # values as many, queries 7 times as many.
    geometry = Geometry(layers=28, query_heads=28, kv_heads=4, head_dim=128)
    estimate = StoreEstimate(geometry=geometry, dtype="bfloat16", sequences=10, tokens=1000)
    assert estimate.raw_bytes == 9 * 28_672_000
    assert estimate.disk_bytes < estimate.raw_bytes
    assert "at most 258.0 MB, about 180.6 MB on disk" in "\n".join(estimate.lines())


def test_a_store_without_queries() -> None:
    geometry = Geometry(layers=1, query_heads=2, kv_heads=1, head_dim=4)
    estimate = StoreEstimate(geometry=geometry, dtype="float32", sequences=1, tokens=10, store="kv")
    assert estimate.raw_bytes == 2 * 10 * 4 * 4
