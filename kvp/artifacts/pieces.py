"""Sharing the pieces of a job out among the workers of a folder; each is done by one of them.

A worker does its own stripe first, then whatever is not there and nobody is at: so it helps slower
workers, does the work of those that never started, and takes over what a dead one left, whose locks
the operating system dropped. It ends when every piece is there.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

from kvp.artifacts.claim import OutputFolder
from kvp.ranks import Rank


def pieces_to_do(
    folder: OutputFolder,
    rank: Rank,
    total: int,
    is_done: Callable[[int], bool],
    look_again: Callable[[int], bool] | None = None,
) -> Iterator[int]:
    """Numbers of pieces that this worker is to do, until all of them are done by whomever.

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
    left = [number for number in rank.order(total) if not is_done(number)]
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
                if not (look_again or is_done)(
                    number
                ):  # another worker may have ended it before the lock
                    worked = True
                    yield number
            finally:
                lock.release()
        left = [number for number in left if not is_done(number)]
        if left and not worked:
            time.sleep(folder.pause_seconds)
