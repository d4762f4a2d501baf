from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from kvp.errors import StoreError
from kvp.store import TraceReader
from kvp.store.paths import shard_path
from train.data.compression_points import CompressionPoint
from train.data.contexts import Context, ContextSource, StepContexts

STEPS = 8


def points_of(step: int) -> list[CompressionPoint]:
    """Two contexts per step; every third sequence comes again."""
    return [
        CompressionPoint(sequence=(2 * step + i) % 6, prefix_length=40 + step, stop=90)
        for i in range(2)
    ]


class Recorded(ContextSource):
    """A source that notes which thread requested which point."""

    def __init__(self, reader: TraceReader, **options: int) -> None:
        super().__init__(reader, memory_bytes=options.get("memory_bytes", 10**8))
        self.requested: list[tuple[CompressionPoint, int]] = []

    def context(self, point: CompressionPoint) -> Context:
        self.requested.append((point, threading.get_ident()))
        return super().context(point)


def equal(some: list[Context], others: list[Context]) -> bool:
    return len(some) == len(others) and all(
        torch.equal(one.keys, other.keys)
        and torch.equal(one.values, other.values)
        and torch.equal(one.positions, other.positions)
        and torch.equal(one.importance, other.importance)
        and one.length == other.length
        for one, other in zip(some, others, strict=True)
    )


@pytest.mark.parametrize("memory_bytes", [1, 10**8])
@pytest.mark.parametrize("first", [0, 5])
def test_contexts_are_the_same_as_without_reading_ahead(
    store: Path, memory_bytes: int, first: int
) -> None:
    source = ContextSource(TraceReader(store), memory_bytes=memory_bytes)
    ahead = StepContexts(source, points_of, steps=STEPS)
    for step in range(first, STEPS):
        fresh = ContextSource(TraceReader(store), memory_bytes=10**8)
        assert equal(ahead.contexts(step), [fresh.context(point) for point in points_of(step)])


def test_one_step_is_made_ahead_in_another_thread_and_none_after_the_last(store: Path) -> None:
    source = Recorded(TraceReader(store))
    ahead = StepContexts(source, points_of, steps=3)
    ahead.contexts(0)
    ahead.contexts(1)
    ahead.contexts(2)
    here = threading.get_ident()
    assert [point for point, _ in source.requested] == [
        point for step in range(3) for point in points_of(step)
    ]
    assert [thread == here for _, thread in source.requested] == [True] * 2 + [False] * 4


def test_a_damaged_sequence_is_an_error_of_the_step_that_needs_it(
    make_store: Callable[..., Path],
) -> None:
    path = make_store(train=4)
    reader = TraceReader(path)
    shard = shard_path(path, "k", 3)
    damaged = bytearray(shard.read_bytes())
    damaged[len(damaged) // 3] ^= 1
    shard.write_bytes(damaged)
    source = ContextSource(reader, memory_bytes=10**8)
    ahead = StepContexts(source, points_of, steps=STEPS)
    ahead.contexts(0)
    with pytest.raises(StoreError, match=shard.name):
        ahead.contexts(1)


def test_validation_may_read_the_source_while_a_step_is_made(store: Path) -> None:
    source = ContextSource(TraceReader(store), memory_bytes=1)
    ahead = StepContexts(source, points_of, steps=STEPS)
    held_out = [
        CompressionPoint(sequence=6 + i % 2, prefix_length=50 + i, stop=90) for i in range(8)
    ]
    expected = [
        ContextSource(TraceReader(store), memory_bytes=1).context(point) for point in held_out
    ]
    for step in range(STEPS):
        ahead.contexts(step)
        assert equal([source.context(point) for point in held_out], expected)
