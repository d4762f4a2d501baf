"""Sequences that several processes make together, each of them once and when it is needed first.

A process makes several at a time: the one that is needed, and some that will be needed next. Where
another is at the one that is needed, this one makes others meanwhile; so processes that draw the
same contexts do not wait for each other. A sequence whose maker died is taken over, since its lock
went with it. Beside `kvp.artifacts.pieces`, which does a whole job in the order of ranks, this does
what training asks for.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

from kvp.artifacts.leases import PieceLease
from kvp.artifacts.locks import FileLock
from kvp.ranks import Rank


@dataclass(frozen=True, kw_only=True)
class SharedWork:
    """Makes sequences by number, as one of several processes."""

    is_there: Callable[[int], bool]
    """Whether a sequence has been made, by whomever."""
    claim: Callable[[int], FileLock | PieceLease | None]
    """The lock of a sequence; None while another process makes it."""
    make: Callable[[Iterable[int]], Iterable[int]]
    """Makes sequences, several at a time; yields the number of each when it is there."""
    together: int
    """Sequences that are best made at a time."""
    rank: Rank
    """Which process this is: where it begins."""
    pause_seconds: float = 0.05
    """Between two looks at what other processes are doing: short, for files on this machine."""

    def one(self, number: int, following: Sequence[int] = ()) -> None:
        """See to it that a sequence is there, made together with some of those `following` it.

        While others make it, some of these are made.
        """
        while not self.is_there(number):
            left = [number, *self._left(following)]
            if not self._made(left, min(self.together, self._share(left))):
                time.sleep(self.pause_seconds)

    def all(self, numbers: Sequence[int]) -> None:
        """See to it that sequences are there: those of this process's stripe first."""
        self._made(numbers[self.rank.index :: self.rank.count])
        while left := self._left([numbers[place] for place in self.rank.order(len(numbers))]):
            if not self._made(left, self._share(left)):
                time.sleep(self.pause_seconds)

    def _left(self, numbers: Iterable[int]) -> list[int]:
        return [number for number in numbers if not self.is_there(number)]

    def _share(self, left: Sequence[int]) -> int:
        """How many to take at a time, so that no process waits long for another at the end."""
        count = self.rank.count
        return len(left) if count == 1 else max(1, len(left) // (2 * count))

    def _made(self, numbers: Iterable[int], most: int | None = None) -> bool:
        """Make `most` sequences that are not there and nobody is at; whether any was made."""
        locks: dict[int, FileLock | PieceLease] = {}
        made = False
        try:
            for number in self.make(islice(self._claimed(numbers, locks), most)):
                made = True
                locks.pop(number).release()
        finally:
            for lock in locks.values():
                lock.release()
        return made

    def _claimed(
        self, numbers: Iterable[int], locks: dict[int, FileLock | PieceLease]
    ) -> Iterator[int]:
        """Numbers that nobody else makes as long as their lock is among `locks`."""
        for number in numbers:
            lock = None if self.is_there(number) else self.claim(number)
            if lock is None:
                continue
            if self.is_there(number):  # made before the lock was taken
                lock.release()
                continue
            locks[number] = lock
            yield number
