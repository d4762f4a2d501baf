"""Which sequences are in the buffer at which pass: a pure function of the pass's number.

Training goes over the buffer in shuffled passes. Before every pass some of the oldest sequences are
replaced by as many new ones, so that each sequence takes part in `epochs_per_sequence` passes and
then leaves; those of the very first buffer leave earlier. With 0 epochs, and of data of no more
sequences than the buffer holds, none is replaced: they are trained on as those of a store are.
"""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass

from train.data.compression_points import sequence_order
from train.recipe import Recipe


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """The sequences n = 0, 1, ... of online collection, pass by pass."""

    buffer: int
    """Sequences in the buffer at any time."""
    epochs_per_sequence: int
    """Passes that a sequence takes part in until it leaves; 0 = it never does."""
    sequences: int = 0
    """Sequences there are; 0 = endless."""

    @property
    def rolls(self) -> bool:
        """Whether sequences are replaced."""
        more = self.sequences == 0 or self.sequences > self.buffer
        return more and self.epochs_per_sequence > 0

    @property
    def size(self) -> int:
        """Sequences of a pass."""
        return min(self.sequences or self.buffer, self.buffer)

    def start(self, passes: int) -> int:
        """The oldest sequence of a pass; the `size - 1` that follow are in it, too."""
        return passes * self.buffer // self.epochs_per_sequence if self.rolls else 0

    def passes(self, recipe: Recipe) -> int:
        """Passes that a training takes, the last one begun included."""
        return -(-recipe.steps * recipe.contexts // (recipe.points_per_sequence * self.size))

    def needed(self, recipe: Recipe) -> int:
        """Sequences that a training needs, counted from 0."""
        return self.start(self.passes(recipe) - 1) + self.size

    def points(self, recipe: Recipe) -> int:
        """Different compression points that a sequence is drawn at, at most."""
        epochs = self.epochs_per_sequence if self.rolls else self.passes(recipe)
        points = epochs * recipe.points_per_sequence
        if not recipe.uniform_points:
            return points
        return min(points, recipe.uniform_points + len(("prompt", "context")))

    def order(self, passes: int, recipe: Recipe, slots: Container[int], *, seed: int) -> list[int]:
        """The sequences of a pass in the order in which training takes them, to its end.

        Only those that serve the contexts `slots` of some step: a process's share of them.
        """
        order = sequence_order(self.size, seed=seed, passes=passes).tolist()
        points, contexts = recipe.points_per_sequence, recipe.contexts
        first = passes * self.size * points
        taken = dict.fromkeys(
            order[(draw - first) // points]
            for draw in range(first, min(first + self.size * points, recipe.steps * contexts))
            if draw % contexts in slots
        )
        return [self.start(passes) + place for place in taken]

    def draws(self, number: int, recipe: Recipe, *, seed: int) -> list[int]:
        """Draws (contexts counted from the first step on) that sequence `number` serves, ascending.

        What `train.data.compression_points.drawn_points` draws from the buffer, computed ahead.
        """
        draws: list[int] = []
        for passes in self._passes_with(number, self.passes(recipe)):
            order = sequence_order(self.size, seed=seed, passes=passes).tolist()
            turn = passes * self.size + order.index(number - self.start(passes))
            first = turn * recipe.points_per_sequence
            draws += range(first, first + recipe.points_per_sequence)
        return [draw for draw in draws if draw < recipe.steps * recipe.contexts]

    def _passes_with(self, number: int, count: int) -> range:
        """Of the first `count` passes those that a sequence takes part in."""
        if not self.rolls:
            return range(count if number < self.size else 0)
        # start(p) <= number < start(p) + buffer, solved for p
        first = -(-(number - self.buffer + 1) * self.epochs_per_sequence // self.buffer)
        last = -(-(number + 1) * self.epochs_per_sequence // self.buffer)
        return range(max(first, 0), min(last, count))
