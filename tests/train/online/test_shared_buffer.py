"""One buffer of several processes: made once, read the same, given up when it has passed."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest
import torch

from kvp.artifacts.locks import FileLock
from kvp.errors import StoreError
from kvp.ranks import Rank
from kvp.store import SequenceRecord, Trace
from train.online.shared_buffer import Entry, SharedBuffer
from train.online.shared_work import SharedWork


def entry(number: int, *, queries: bool = False) -> Entry:
    random = torch.Generator().manual_seed(number)
    record = SequenceRecord(
        index=number, id=f"é {number}", task="t", split="train", length=12, context_length=8,
        prompt_length=10, token_ids=tuple(range(12)), reply_spans=((10, 12),), references=("a",),
    )  # fmt: skip
    trace = Trace(
        record=record,
        queries=torch.randn(2, 1, 3, 12, 4, generator=random) if queries else None,
        keys=torch.randn(2, 1, 12, 4, generator=random).bfloat16(),
        values=-torch.zeros(2, 1, 12, 4),
        labels={"kvzip_plus": torch.rand(2, 1, 10, generator=random)},
    )
    points = {
        ("future_attention", 8, 12): torch.rand(2, 1, 8, generator=random),
        ("some.module:label", 9, 10): torch.rand(2, 1, 9, generator=random),
    }
    return trace, points


def entries(numbers: Iterable[int]) -> Iterator[tuple[int, Entry]]:
    return ((number, entry(number)) for number in numbers)


@pytest.mark.parametrize("queries", [False, True])
def test_what_one_makes_the_others_read(tmp_path: Path, queries: bool) -> None:
    made: list[int] = []

    def make(numbers: Iterable[int]) -> Iterator[tuple[int, Entry]]:
        for number in numbers:
            made.append(number)
            yield number, entry(number, queries=queries)

    buffers = [
        SharedBuffer(tmp_path / "buffer", Rank(index=i, count=2), together=3) for i in range(2)
    ]
    buffers[0].make_all([4, 5, 6], make)
    for buffer in buffers:
        for number in (5, 4, 6, 1_000_007):
            trace, points = buffer.get(number, make)
            theirs, expected = entry(number, queries=queries)
            assert trace.record == theirs.record
            assert (trace.queries is None) == (not queries)
            if trace.queries is not None and theirs.queries is not None:
                assert torch.equal(trace.queries, theirs.queries)
            assert torch.equal(trace.keys, theirs.keys)
            assert trace.keys.dtype == torch.bfloat16
            assert torch.equal(trace.values.view(torch.int32), theirs.values.view(torch.int32))
            assert torch.equal(trace.labels["kvzip_plus"], theirs.labels["kvzip_plus"])
            assert points.keys() == expected.keys()
            assert all(torch.equal(points[at], expected[at]) for at in expected)
    assert made == [4, 6, 5, 1_000_007], "its own stripe first"
    assert {path.suffix for path in (tmp_path / "buffer").iterdir()} == {".safetensors"}


def test_what_has_passed_is_deleted_and_can_be_read_on(tmp_path: Path) -> None:
    buffer = SharedBuffer(tmp_path, Rank(count=2), together=3)
    buffer.make_all(range(5), entries)
    kept = buffer.get(1, entries)[0]
    buffer.delete_below(3)
    buffer.delete_below(2)
    assert sorted(int(path.stem) for path in tmp_path.iterdir()) == [3, 4]
    assert torch.equal(kept.keys, entry(1)[0].keys)
    assert torch.equal(buffer.get(2, entries)[0].keys, entry(2)[0].keys), "made again"


def test_damage_names_the_file(tmp_path: Path) -> None:
    buffer = SharedBuffer(tmp_path, Rank(count=2), together=3)
    (tmp_path / "000003.safetensors").write_bytes(b"half")
    with pytest.raises(StoreError, match=r"000003\.safetensors is not a readable"):
        buffer.get(3, entries)


def test_processes_that_want_the_same_do_not_wait_for_each_other(tmp_path: Path) -> None:
    """Sequence 0 is being made by another; this one makes what comes later meanwhile."""
    made: list[int] = []
    locks = {number: FileLock.take(tmp_path / f"{number}.lock") for number in (0, 4)}
    there: set[int] = set()

    def make(numbers: Iterable[int]) -> Iterator[int]:
        for number in list(numbers):
            made.append(number)
            there.add(number)
            yield number

    def claim(number: int) -> FileLock | None:
        if len(made) == 2 and (lock := locks.pop(0, None)) is not None:
            there.add(0)  # the other one ends
            lock.release()
        return FileLock.take(tmp_path / f"{number}.lock")

    work = SharedWork(
        is_there=there.__contains__,
        claim=claim,
        make=make,
        together=2,
        rank=Rank(index=1, count=2),
    )
    work.one(0, following=[2, 4, 1, 3, 5, 7, 9, 11, 13])
    assert made == [2, 1, 3, 5]
    assert there == {0, *made}


def test_what_a_dead_process_was_making_is_made_by_another(tmp_path: Path) -> None:
    there: set[int] = set()
    lock = FileLock.take(tmp_path / "0.lock")
    assert lock is not None

    def make(numbers: Iterable[int]) -> Iterator[int]:
        for number in numbers:
            there.add(number)
            yield number

    work = SharedWork(
        is_there=there.__contains__,
        claim=lambda number: FileLock.take(tmp_path / f"{number}.lock"),
        make=make,
        together=2,
        rank=Rank(count=2),
    )
    threading.Timer(0.3, lock.release).start()  # as the system does when a process dies
    work.all([0, 1])
    assert there == {0, 1}
