"""Sharing the pieces of a job out among the workers of a folder; each is done by one of them.

A worker does its own stripe first, then whatever is not there and nobody is at: so it helps slower
workers, does the work of those that never started, and takes over what a dead one left, whose locks
the operating system dropped. It ends when every piece is there.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

from kvp.artifacts.locks import FileLock
from kvp.ranks import Rank

PAUSE_SECONDS = 0.2
"""Between two looks at what other workers are doing."""


class Pieces(Protocol):
    """What is worked on: `kvp.artifacts.claim.OutputFolder`, or another place with locks."""

    @property
    def shared(self) -> bool:
        """Whether there may be other workers."""

    def piece(self, number: int) -> FileLock | None:
        """The lock of one piece of work; None while another worker does it."""


def pieces_to_do(
    folder: Pieces, rank: Rank, total: int | Sequence[int], is_done: Callable[[int], bool]
) -> Iterator[int]:
    """Numbers of pieces that this worker is to do, until all of them are done by whomever.

    Args:
        folder: the claimed folder.
        rank: which worker this is.
        total: how many pieces the job has, numbered alike in all workers, or the numbers of those
            that are wanted.
        is_done: whether a piece is there; true of a number before the next is asked for.

    Yields:
        A number that no other worker does meanwhile, until the next one is asked for.
    """
    numbers = range(total) if isinstance(total, int) else total
    left = [numbers[place] for place in rank.order(len(numbers))]
    left = [number for number in left if not is_done(number)]
    if not folder.shared:
        yield from left
        return
    while left:
        worked = False
        for number in left:
            lock = None if is_done(number) else folder.piece(number)
            if lock is None:
                continue
            try:
                if not is_done(number):  # another worker may have ended it before the lock
                    worked = True
                    yield number
            finally:
                lock.release()
        left = [number for number in left if not is_done(number)]
        if left and not worked:
            time.sleep(PAUSE_SECONDS)
