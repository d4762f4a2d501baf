"""What is kept of the sequences that ran through a model, and which attention is asked for."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from kvp.geometry import Geometry
from kvp.ops.future_attention import future_attention, max_future_attention
from kvp.store import SequenceRecord, StorePlan, Trace
from train.data.compression_points import sequence_order
from train.online.model_traces import Attention, ModelTraces
from train.online.training_data import draws_of
from train.recipe import PRESETS

GEOMETRY = Geometry(layers=2, query_heads=4, kv_heads=2, head_dim=8)
POINTS: list[Attention] = [("future_attention", 20, 48), ("max_future_attention", 30, 40)]
GRAM = torch.arange(2.0 * 2 * 8 * 8).view(2, 2, 8, 8)


def trace() -> Trace:
    random, tokens = torch.Generator().manual_seed(3), 48
    record = SequenceRecord(
        index=3, id="3", task="random", split="train", length=tokens, context_length=30,
        prompt_length=40, token_ids=tuple(range(tokens)),
    )  # fmt: skip
    return Trace(
        record=record,
        queries=torch.randn(2, 2, 2, tokens, 8, generator=random),
        keys=torch.randn(2, 2, tokens, 8, generator=random),
        values=torch.randn(2, 2, tokens, 8, generator=random),
        labels={"kvzip": torch.rand(2, 2, 40, generator=random)},
    )


def traces(store: str = "kv", heads: range | None = None) -> ModelTraces:
    plan = StorePlan(
        geometry=GEOMETRY, dtype="float32", max_tokens=48, sequences=5, labels=("kvzip",),
        store=store,  # type: ignore[arg-type]
    )  # fmt: skip
    kept = ModelTraces(
        plan=plan, manifest={"model": {}}, gram=GRAM, attention=lambda record: POINTS,
        device=torch.device("cpu"), heads=heads,
    )  # fmt: skip
    kept.keep(trace())
    return kept


@pytest.mark.parametrize("store", ["kv", "qkv"])
def test_what_is_read_is_what_ran(store: str) -> None:
    kept, whole = traces(store), trace()
    assert whole.queries is not None
    assert torch.equal(kept.kv(3)[0], whole.keys)
    assert torch.equal(kept.kv(3)[1], whole.values)
    assert torch.equal(kept.label("kvzip", 3), whole.labels["kvzip"])
    assert (kept.trace(3).queries is None) == (store == "kv")
    if store == "qkv":
        assert kept.importance("future_attention", 3, 20) is None
    else:
        expected = future_attention(whole.queries, whole.keys, 20)
        assert torch.equal(kept.importance("future_attention", 3, 20), expected)
        largest = max_future_attention(whole.queries, whole.keys, 30, 40)
        assert torch.equal(kept.importance("max_future_attention", 3, 30, 40), largest)


def test_some_heads_only() -> None:
    part, whole = traces(heads=range(1, 3)), traces()
    for some, full in zip(part.kv(3), whole.kv(3), strict=True):
        assert torch.equal(some, full.flatten(0, 1)[1:3][None])
    full = whole.importance("future_attention", 3, 20)
    some = part.importance("future_attention", 3, 20)
    assert full is not None
    torch.testing.assert_close(some, full.flatten(0, 1)[1:3][None])
    assert part.label("kvzip", 3).shape == (1, 2, 40)
    gram = part.output_gram()
    assert gram is not None
    assert torch.equal(gram, GRAM.flatten(0, 1)[1:3][None])


@pytest.mark.parametrize("points_per_sequence", [1, 3])
def test_draws_are_computed_ahead(points_per_sequence: int) -> None:
    recipe = replace(
        PRESETS["fourier"], steps=13, contexts=4, points_per_sequence=points_per_sequence
    )
    expected: dict[int, list[int]] = {}
    for draw in range(13 * 4):
        passes, index = divmod(draw // points_per_sequence, 5)
        number = int(sequence_order(5, seed=3, passes=passes)[index])
        expected.setdefault(number, []).append(draw)
    for number in range(5):
        assert draws_of(number, 5, recipe, seed=3) == expected.get(number, [])
