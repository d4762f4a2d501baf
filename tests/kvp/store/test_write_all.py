"""Writing many sequences in a thread: all are written, or an error reaches the caller."""

from threading import Event, Thread

import pytest

from kvp.errors import StoreError
from kvp.store import TraceReader, TraceWriter


class Held(TraceWriter):
    """A writer that waits for `go` before it writes, and may refuse sequence 1."""

    go: Event
    began: Event
    refuses = False

    def write(self, trace):
        self.began.set()
        assert self.go.wait(60)
        if self.refuses and trace.record.index == 1:
            raise StoreError("the disk is full")
        super().write(trace)


@pytest.fixture
def held(tmp_path, plan, manifest):
    with Held.create_or_resume(tmp_path / "store", plan, manifest) as writer:
        writer.go, writer.began = Event(), Event()
        yield writer


def test_all_sequences_are_committed_as_they_come(held, plan, make_trace):
    given = []
    traces = (make_trace(plan, index) for index in (2, 0, 1))
    giver = Thread(
        target=held.write_all, args=(traces, lambda trace: given.append(trace.record.index))
    )
    giver.start()
    giver.join(0.5)
    assert given == [2]  # it is being written
    held.go.set()
    giver.join(60)
    assert given == [2, 0, 1]
    reader = TraceReader(held.path)
    assert [reader.trace(index).record.index for index in range(3)] == [0, 1, 2]


def test_an_error_reaches_the_caller(held, plan, make_trace):
    held.refuses = True
    held.go.set()
    with pytest.raises(StoreError, match="the disk is full"):
        held.write_all((make_trace(plan, index) for index in range(3)), lambda _: None)
    assert 1 not in [record.index for record in TraceReader(held.path).records()]


def test_an_interrupt_waits_for_the_sequence_that_is_being_written(held, plan, make_trace):
    def interrupted():
        yield make_trace(plan, 0)
        assert held.began.wait(60)
        Thread(target=lambda: (Event().wait(0.2), held.go.set())).start()
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        held.write_all(interrupted(), lambda _: None)
    assert [record.index for record in TraceReader(held.path).records()] == [0]
