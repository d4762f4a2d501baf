"""A reader of some heads reads what a reader of all reads for them."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from kvp.store import StorePlan, Trace, TraceReader, TraceWriter


@pytest.fixture
def labelled(
    tmp_path: Path,
    plan: StorePlan,
    manifest: dict[str, Any],
    make_trace: Callable[[StorePlan, int], Trace],
) -> Path:
    """A store with a label."""
    plan = replace(plan, labels=("kvzip",))
    with TraceWriter.create_or_resume(tmp_path / "labelled", plan, manifest) as writer:
        trace = make_trace(plan, 0)
        label = torch.rand(2, 2, trace.record.prompt_length)
        writer.write(replace(trace, labels={"kvzip": label}))
    return tmp_path / "labelled"


@pytest.mark.parametrize("heads", [slice(0, 1), slice(1, 3), slice(2, 4), slice(0, 4)])
def test_tensors_are_those_of_the_heads(heads: slice, store: Path) -> None:
    whole, part = TraceReader(store), TraceReader(store, heads=heads)
    part = pickle.loads(pickle.dumps(part))
    assert part.geometry == whole.geometry
    for ours, theirs in zip(part.kv(2), whole.kv(2), strict=True):
        assert torch.equal(ours, theirs.flatten(0, 1)[heads][None])
    queries, everything = part.trace(0).queries, whole.trace(0).queries
    assert queries is not None
    assert everything is not None
    assert torch.equal(queries, everything.flatten(0, 1)[heads][None])
    assert torch.equal(part.head(0, 1, 1)[1], whole.head(0, 1, 1)[1])


def test_labels_are_those_of_the_heads(labelled: Path) -> None:
    whole, part = TraceReader(labelled), TraceReader(labelled, heads=slice(1, 3))
    assert torch.equal(part.label("kvzip", 0), whole.label("kvzip", 0).flatten(0, 1)[1:3][None])
