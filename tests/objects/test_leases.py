"""Leases: one writer, workers in turns, the dead replaced, all by the server's clock."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest

from kvp.artifacts.addresses import ObjectPath, files_below
from kvp.artifacts.leases import FolderLease
from kvp.errors import StoreError


class Dead(FolderLease):
    """A lease whose process has ended without a word."""

    def __init__(self, folder: ObjectPath, *, shared: bool) -> None:
        super().__init__(folder, StoreError, shared=shared)
        self._heart._stopped.set()  # what a kill does: no beat follows


def test_one_writer_at_a_time(prefix: ObjectPath) -> None:
    first = FolderLease(prefix, StoreError)
    for shared in (False, True):
        with pytest.raises(StoreError, match=r"is being written by process \d+ on .*; wait for it"):
            FolderLease(prefix, StoreError, shared=shared)
    first.release()
    first.release()
    FolderLease(prefix, StoreError, shared=True).release()
    assert [*files_below(prefix)] == []


def test_a_dead_writer_is_waited_for_and_replaced(prefix: ObjectPath) -> None:
    dead = Dead(prefix, shared=False)
    started = time.monotonic()
    second = FolderLease(prefix, StoreError)
    assert 0.5 < time.monotonic() - started < 20
    assert dead._heart.id not in "".join(second._heart.living())
    second.release()


def test_workers_take_turns_and_pieces(prefix: ObjectPath) -> None:
    first = FolderLease(prefix, StoreError, shared=True)
    assert first.first
    got: list[FolderLease] = []
    waiting = threading.Thread(
        target=lambda: got.append(FolderLease(prefix, StoreError, shared=True))
    )
    waiting.start()
    time.sleep(0.5)
    assert not got  # the first prepares the folder
    first.end_turn()
    waiting.join()
    second = got[0]
    assert not second.first
    second.end_turn()
    piece = first.piece(3)
    assert piece is not None
    assert second.piece(3) is None
    assert first.piece(3) is None
    piece.release()
    again = second.piece(3)
    assert again is not None
    again.release()
    order: list[str] = []

    def turn(lease: FolderLease, name: str) -> None:
        with lease.turn():
            order.append(name)
            time.sleep(0.3)
            order.append(name)

    threads = [threading.Thread(target=turn, args=pair) for pair in ((first, "a"), (second, "b"))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert order in (["a", "a", "b", "b"], ["b", "b", "a", "a"])
    swept: list[str] = []
    first.release(lambda: swept.append("first"))
    second.release(lambda: swept.append("second"))
    assert swept == ["second"]
    assert [*files_below(prefix)] == []


def test_pieces_of_a_dead_worker_become_free(prefix: ObjectPath) -> None:
    dead = Dead(prefix, shared=True)
    dead.end_turn()
    assert dead.piece(0) is not None
    second = FolderLease(prefix, StoreError, shared=True)
    second.end_turn()
    deadline = time.monotonic() + 20
    while (piece := second.piece(0)) is None:
        assert time.monotonic() < deadline
        time.sleep(0.1)
    piece.release()
    second.release()


def test_a_writer_that_lives_keeps_its_lease(prefix: ObjectPath) -> None:
    first = FolderLease(prefix, StoreError, shared=True)
    first.end_turn()
    second = FolderLease(prefix, StoreError, shared=True)
    second.end_turn()
    piece = first.piece(0)
    assert piece is not None
    for _ in range(10):
        assert second.piece(0) is None
        time.sleep(0.5)
    first.release()
    assert second.piece(0) is not None
    second.release()


def test_a_server_without_conditional_writes_takes_one_process(
    prefix: ObjectPath, monkeypatch: pytest.MonkeyPatch
) -> None:
    def always(self: Any, key: str, content: bytes, there: object) -> bool:
        self.write(key, content)
        return True

    monkeypatch.setattr("kvp.artifacts.objects.Bucket.write_if", always)
    with pytest.raises(StoreError, match=r"ignores conditional writes .*one process per folder"):
        FolderLease(prefix, StoreError, shared=True)
    FolderLease(prefix, StoreError).release()
