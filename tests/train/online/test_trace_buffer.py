"""The buffer: what it holds, what it forgets, and that neither changes what is read."""

from __future__ import annotations

import pytest
import torch
from train.online.trace_buffer import Attention, ModelTraces, RecordWindow, Tracing

from kvp.geometry import Geometry
from kvp.ops.future_attention import future_attention, max_future_attention
from kvp.store import SequenceRecord, StorePlan, Trace

GEOMETRY = Geometry(layers=2, query_heads=4, kv_heads=2, head_dim=8)
POINTS: list[Attention] = [
    ("future_attention", 20, 48),
    ("max_future_attention", 30, 40),
    ("future_attention", 20, 48),
]
GRAM = torch.arange(2.0 * 2 * 8 * 8).view(2, 2, 8, 8)


def trace_of(number: int) -> Trace:
    random = torch.Generator().manual_seed(number)
    tokens = 48
    record = SequenceRecord(
        index=number,
        id=str(number),
        task="random",
        split="train",
        length=tokens,
        context_length=30,
        prompt_length=40,
        token_ids=tuple(range(tokens)),
    )
    return Trace(
        record=record,
        queries=torch.randn(2, 2, 2, tokens, 8, generator=random),
        keys=torch.randn(2, 2, tokens, 8, generator=random),
        values=torch.randn(2, 2, tokens, 8, generator=random),
        labels={"kvzip": torch.rand(2, 2, 40, generator=random)},
    )


def traces(store: str = "importance", heads: slice | None = None) -> ModelTraces:
    plan = StorePlan(
        geometry=GEOMETRY,
        dtype="float32",
        max_tokens=48,
        sequences=5,
        store=store,  # type: ignore[arg-type]
        grid=4 if store == "importance" else 0,
        labels=("kvzip",),
    )
    tracing = Tracing(
        traces=lambda numbers: (trace_of(number) for number in reversed(list(numbers))),
        together=2,
        attention=lambda record: POINTS,
        manifest={"model": {}},
        output_gram=GRAM,
    )
    return ModelTraces(tracing, plan, capacity=3, pinned=range(100, 102), heads=heads)


def test_the_oldest_leave_and_come_back_the_same() -> None:
    buffer = traces()
    for number in (100, 2, 0, 1, 101, 3, 2, 4):
        keys, values = buffer.kv(number)
        assert torch.equal(keys, trace_of(number).keys)
        assert torch.equal(values, trace_of(number).values)
        assert len(buffer.sequences) <= 3 + 2
    assert buffer.sequences == [2, 3, 4, 100, 101]
    assert (buffer.traced, buffer.tokens) == (7, 7 * 48)
    assert torch.equal(buffer.kv(0)[0], trace_of(0).keys)
    assert buffer.sequences == [2, 3, 4, 100, 101], "what is older than the buffer does not stay"


def test_what_is_read_next_is_traced_with_what_is_missing() -> None:
    buffer = traces()
    buffer.expect([4, 2, 3])
    for number, held in ((9, [9]), (4, [2, 4, 9]), (3, [3, 4, 9]), (2, [3, 4, 9]), (1, [3, 4, 9])):
        assert torch.equal(buffer.kv(number)[0], trace_of(number).keys)
        assert buffer.sequences == held
    assert buffer.traced == 1 + 2 + 1 + 1 + 1
    buffer.trace_all(range(5, 8))
    assert buffer.sequences == [6, 7, 9]


@pytest.mark.parametrize("store", ["importance", "qkv"])
def test_attention_is_that_of_the_queries(store: str) -> None:
    buffer = traces(store)
    whole = trace_of(3)
    assert whole.queries is not None
    expected = future_attention(whole.queries, whole.keys, 20)
    assert torch.equal(buffer.importance("future_attention", 3, 20), expected)
    largest = max_future_attention(whole.queries, whole.keys, 30, 40)
    assert torch.equal(buffer.importance("max_future_attention", 3, 30, 40), largest)
    assert torch.equal(buffer.label("kvzip", 3), whole.labels["kvzip"])
    assert buffer.traced == (1 if store == "importance" else 3)
    unforeseen = future_attention(whole.queries, whole.keys, 25)
    assert torch.equal(buffer.importance("future_attention", 3, 25), unforeseen)
    assert (buffer.trace(3).queries is None) == (store == "importance")


def test_bytes_are_those_of_all_tensors() -> None:
    # 4 heads x (keys and values of 48 x 8, points of 20 and 30 tokens, a label of 40), float32
    buffer = traces()
    buffer.kv(0)
    buffer.kv(1)
    assert buffer.used_bytes == 2 * 4 * 4 * (2 * 48 * 8 + 20 + 30 + 40)


def test_some_heads_only() -> None:
    buffer, whole = traces(heads=slice(1, 3)), traces()
    for part, full in zip(buffer.kv(5), whole.kv(5), strict=True):
        assert torch.equal(part, full.flatten(0, 1)[1:3][None])
    for prefix in (20, 33):
        full = whole.importance("future_attention", 5, prefix)
        part = buffer.importance("future_attention", 5, prefix)
        torch.testing.assert_close(part, full.flatten(0, 1)[1:3][None])
    assert buffer.label("kvzip", 5).shape == (1, 2, 40)
    gram = buffer.output_gram()
    assert gram is not None
    assert torch.equal(gram, GRAM.flatten(0, 1)[1:3][None])


def test_a_window_traces_what_is_looked_at() -> None:
    buffer = traces()
    window = RecordWindow(buffer, range(4, 7))
    assert (len(window), buffer.traced) == (3, 0)
    assert window[1].index == 5
    assert buffer.traced == 1
    assert [record.index for record in window[1:]] == [5, 6]
    assert buffer.traced == 2
