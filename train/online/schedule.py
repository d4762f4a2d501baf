"""Which sequences of a stream are in the buffer when: a pure function of the visit's number.

Training visits the buffer in shuffled passes. Before every pass some of the oldest sequences make
room for as many new ones, so that each sequence is visited `visits` times, once per pass, and then
leaves; those of the very first buffer leave earlier. A stream with no more sequences than the
buffer holds never rolls: it is trained on as a store is.
"""

from __future__ import annotations

from dataclasses import dataclass

from train.data.compression_points import visit_order
from train.recipe import Recipe


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """The sequences n = 0, 1, ... of a stream, pass by pass."""

    buffer: int
    """Sequences in the buffer at any time."""
    visits: int
    """Visits of a sequence until it leaves."""
    sequences: int = 0
    """Sequences of the stream; 0 = endless."""

    @property
    def rolls(self) -> bool:
        """Whether there is more in the stream than fits."""
        return self.sequences == 0 or self.sequences > self.buffer

    @property
    def size(self) -> int:
        """Sequences that a pass visits."""
        return self.buffer if self.rolls else self.sequences

    def start(self, passes: int) -> int:
        """The oldest sequence of a pass; it visits this one and the `size - 1` that follow."""
        return passes * self.buffer // self.visits if self.rolls else 0

    def passes(self, recipe: Recipe) -> int:
        """Passes that a training takes, the last one begun included."""
        return -(-recipe.steps * recipe.contexts // (recipe.points_per_sequence * self.size))

    def needed(self, recipe: Recipe) -> int:
        """Sequences that a training visits, from 0 on."""
        return self.start(self.passes(recipe) - 1) + self.size

    def draws(self, number: int, recipe: Recipe, *, seed: int) -> list[int]:
        """Draws (contexts counted from the first step on) that sequence `number` serves, ascending.

        What `train.data.compression_points.step_points` draws from the buffer, known ahead.
        """
        found: list[int] = []
        for passes in self._passes_with(number, self.passes(recipe)):
            order = visit_order(self.size, seed=seed, passes=passes).tolist()
            visit = passes * self.size + order.index(number - self.start(passes))
            first = visit * recipe.points_per_sequence
            found += range(first, first + recipe.points_per_sequence)
        return [draw for draw in found if draw < recipe.steps * recipe.contexts]

    def _passes_with(self, number: int, count: int) -> range:
        """Of the first `count` passes those that visit a sequence."""
        if not self.rolls:
            return range(count if number < self.size else 0)
        # start(p) <= number < start(p) + buffer, solved for p
        first = -(-(number - self.buffer + 1) * self.visits // self.buffer)
        last = -(-(number + 1) * self.visits // self.buffer)
        return range(max(first, 0), min(last, count))
