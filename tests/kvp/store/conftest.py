"""A small store and the traces in it, made from seeds alone."""

import pytest
import torch

from kvp.geometry import Geometry
from kvp.store import SequenceRecord, StorePlan, Trace, TraceWriter


@pytest.fixture(scope="session")
def plan():
    geometry = Geometry(layers=2, query_heads=4, kv_heads=2, head_dim=4)
    return StorePlan(geometry=geometry, dtype="bfloat16", max_tokens=24, sequences=3)


@pytest.fixture(scope="session")
def manifest():
    return {"identity": {"seed": 0, "data": {"length": 16, "tasks": ["a", "b"]}}, "note": "test"}


@pytest.fixture(scope="session")
def make_trace():
    def build(plan, index):
        generator = torch.Generator().manual_seed(index)
        tokens = plan.max_tokens - 1 - index % 5
        size, dtype = plan.geometry, getattr(torch, plan.dtype)

        def noise(*shape):
            return torch.randn(*shape, size.head_dim, generator=generator).to(dtype)

        record = SequenceRecord(
            index=index,
            id=f"sample-{index}",
            task="niah",
            split="validation" if index % 2 else "train",
            length=tokens,
            context_length=tokens - 6,
            prompt_length=tokens - 4,
            token_ids=tuple(range(index, index + tokens)),
            reply_spans=((tokens - 4, tokens),),
            references=("naïve ✓", "two"),
            max_new_tokens=8,
            metric="string_match_all",
        )
        heads = (size.layers, size.kv_heads)
        queries, keys = noise(*heads, size.group, tokens), noise(*heads, tokens)
        return Trace(
            record=record,
            queries=queries if plan.store_queries else None,
            keys=keys,
            values=noise(*heads, tokens),
        )

    return build


@pytest.fixture
def store(tmp_path, plan, manifest, make_trace):
    """Sequences 0 and 2 of three."""
    path = tmp_path / "store"
    with TraceWriter.create_or_resume(path, plan, manifest) as writer:
        for index in (2, 0):
            writer.write(make_trace(plan, index))
    return path
