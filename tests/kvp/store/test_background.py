"""Writing in the background: all or an error, bounded, and nothing after the block."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from threading import Event, Thread
from typing import Any

import pytest

from kvp.errors import StoreError
from kvp.store import StorePlan, Trace, TraceReader, TraceWriter
from kvp.store.background import BackgroundWriter

MakeTrace = Callable[..., Trace]


class Held(TraceWriter):
    """Waits before it writes; sequence 1 may be refused."""

    go: Event
    began: Event
    refuses = False

    def write(self, trace: Trace) -> None:
        self.began.set()
        assert self.go.wait(60)
        if self.refuses and trace.record.index == 1:
            raise StoreError("the disk is full")
        super().write(trace)


@pytest.fixture
def held(tmp_path: Path, plan: StorePlan, manifest: dict[str, Any]) -> Iterator[Held]:
    with Held.create_or_resume(tmp_path / "store", plan, manifest) as writer:
        assert isinstance(writer, Held)
        writer.go, writer.began = Event(), Event()
        yield writer
        writer.go.set()


def test_all_are_committed_when_the_block_ends(
    held: Held, plan: StorePlan, make_trace: MakeTrace
) -> None:
    held.go.set()
    with BackgroundWriter(held) as background:
        for index in (2, 0, 1):
            background.write(make_trace(plan, index))
    reader = TraceReader(held.path)
    reader.verify()
    assert reader.complete


def test_no_more_wait_than_allowed(held: Held, plan: StorePlan, make_trace: MakeTrace) -> None:
    given: list[int] = []
    with BackgroundWriter(held, waiting=1) as background:

        def give() -> None:
            for index in range(3):
                background.write(make_trace(plan, index))
                given.append(index)

        giver = Thread(target=give)
        giver.start()
        assert held.began.wait(60)
        giver.join(0.3)
        assert given == [0, 1]  # one is being written, one waits, and the third stays outside
        held.go.set()
        giver.join(60)
        assert given == [0, 1, 2]
    assert TraceReader(held.path).complete


def test_an_error_reaches_the_caller_and_nothing_is_written_after_it(
    held: Held, plan: StorePlan, make_trace: MakeTrace
) -> None:
    held.refuses = True
    held.go.set()

    def write_all() -> None:
        with BackgroundWriter(held) as background:
            for index in range(3):
                background.write(make_trace(plan, index))

    with pytest.raises(StoreError, match="the disk is full"):
        write_all()
    assert [record.index for record in TraceReader(held.path).records()] == [0]


def test_what_waits_is_dropped_when_the_block_ends_by_an_error(
    held: Held, plan: StorePlan, make_trace: MakeTrace
) -> None:
    def interrupted() -> None:
        with BackgroundWriter(held) as background:
            for index in range(3):
                background.write(make_trace(plan, index))
            assert held.began.wait(60)
            Thread(target=lambda: (Event().wait(0.2), held.go.set())).start()
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    # The one that was being written.
    assert [record.index for record in TraceReader(held.path).records()] == [0]
