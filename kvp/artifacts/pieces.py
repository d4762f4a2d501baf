"""Sharing the pieces of a job out among the workers of a folder; each is done by one of them.

A worker does its own stripe first, then whatever is not there and nobody is at: so it helps slower
workers, does the work of those that never started, and takes over what a dead one left, whose locks
the operating system dropped. It ends when every piece is there.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from types import TracebackType

from kvp.artifacts.claim import OutputFolder
from kvp.artifacts.leases import PieceLease
from kvp.artifacts.locks import FileLock
from kvp.ranks import Rank


class Pieces:
    """The pieces that a worker takes, any number of them at a time, until `close`."""

    def __init__(
        self,
        folder: OutputFolder,
        rank: Rank,
        total: int,
        is_done: Callable[[int], bool],
        look_again: Callable[[int], bool] | None = None,
    ) -> None:
        """Nothing is taken yet; arguments as of `pieces_to_do`."""
        self._folder = folder
        self._rank = rank
        self._left = [number for number in rank.order(total) if not is_done(number)]
        self._is_done = is_done
        self._look_again = look_again or is_done
        self._locks: dict[int, FileLock | PieceLease] = {}
        self.pause_seconds = folder.pause_seconds
        """Between two looks at what other workers are doing."""

    def take(self) -> Iterator[int | None]:
        """Numbers that no other worker does until they are given back, each once.

        The worker's own stripe comes first. Of the others' pieces, it holds no more at a time than
        a worker's share of half of what is left, so that none waits long for another at the end.
        None where nothing can be taken now: ask again later. Ends when all pieces are there; in a
        folder of one's own, when all were taken.
        """
        if not self._folder.shared:
            yield from self._left
            return
        index, count = self._rank.index, self._rank.count
        for number in [number for number in self._left if number % count == index]:
            if self._claim(number):
                yield number
        while True:
            self._left = [number for number in self._left if not self._is_done(number)]
            if not self._left:
                return
            room = max(1, len(self._left) // (2 * count)) - len(self._locks)
            taken = 0
            for number in self._left:
                if taken < room and self._claim(number):
                    taken += 1
                    yield number
            if not taken:
                yield None

    def give_back(self, number: int) -> None:
        """Let other workers look at a piece, which is there or will not be done; any thread may."""
        lock = self._locks.pop(number, None)
        if lock is not None:
            lock.release()

    def close(self) -> None:
        """Give all pieces back; safe to call twice."""
        for number in list(self._locks):
            self.give_back(number)

    def __enter__(self) -> Pieces:
        """Return itself."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Close."""
        self.close()

    def _claim(self, number: int) -> bool:
        if number in self._locks or self._is_done(number):
            return False
        lock = self._folder.piece(number)
        if lock is None:
            return False
        if self._look_again(number):  # another worker may have ended it before the lock
            lock.release()
            return False
        self._locks[number] = lock
        return True


def pieces_to_do(
    folder: OutputFolder,
    rank: Rank,
    total: int,
    is_done: Callable[[int], bool],
    look_again: Callable[[int], bool] | None = None,
) -> Iterator[int]:
    """Numbers of pieces that this worker is to do, one at a time, until all of them are there.

    Args:
        folder: the claimed folder.
        rank: which worker this is.
        total: pieces of the job, numbered alike in all workers.
        is_done: whether a piece is there; true of a number before the next is asked for.
        look_again: likewise, asked while nobody else does the piece; for an `is_done` that may
            know of other workers' pieces a little later.

    Yields:
        A number that no other worker does meanwhile, until the next one is asked for.
    """
    with Pieces(folder, rank, total, is_done, look_again) as pieces:
        for number in pieces.take():
            if number is None:
                time.sleep(pieces.pause_seconds)
                continue
            try:
                yield number
            finally:
                pieces.give_back(number)
