"""Sequences that several processes make together, each of them once and when it is needed first.

Where another process is at the one that is needed, this one makes another that will be needed
meanwhile; so processes that draw the same contexts do not wait for each other. A sequence whose
maker died is taken over, since its lock went with it. Beside `kvp.artifacts.pieces`, which does a
whole job in the order of ranks, this does what training asks for.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from kvp.artifacts.leases import PieceLease
from kvp.artifacts.locks import FileLock
from kvp.ranks import Rank

PAUSE_SECONDS = 0.05
"""Between two looks at what other processes are doing."""


@dataclass(frozen=True, kw_only=True)
class SharedWork:
    """Makes sequences by number, as one of several processes."""

    is_there: Callable[[int], bool]
    """Whether a sequence has been made, by whomever."""
    claim: Callable[[int], FileLock | PieceLease | None]
    """The lock of a sequence; None while another process makes it."""
    make: Callable[[int], None]
    """Makes a sequence, which is there then."""
    rank: Rank
    """Which process this is: where it begins."""

    def one(self, number: int, meanwhile: Iterable[int] = ()) -> None:
        """See to it that a sequence is there; while others make it, make one of `meanwhile`."""
        while not self._made(number) and not self.is_there(number):
            if not any(self._made(other) for other in meanwhile):
                time.sleep(PAUSE_SECONDS)

    def all(self, numbers: Sequence[int]) -> None:
        """See to it that sequences are there: those of this process's stripe first."""
        for number in self.in_order(numbers):
            self._made(number)
        for number in numbers:
            self.one(number)

    def in_order(self, numbers: Sequence[int]) -> list[int]:
        """Numbers as this process takes them: its own stripe, then the others from the end."""
        return [numbers[place] for place in self.rank.order(len(numbers))]

    def _made(self, number: int) -> bool:
        """Make a sequence, unless it is there or somebody is at it; whether it was made."""
        lock = None if self.is_there(number) else self.claim(number)
        if lock is None:
            return False
        try:
            if self.is_there(number):  # made before the lock was taken
                return False
            self.make(number)
            return True
        finally:
            lock.release()
