"""Values of options that `kvp tune` tries, declared next to the options of each method.

`Choices` are tried all. `Numbers` are where a search begins: it goes on below and above them until
the best value lies between others, or at the option's own bound.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Choices:
    """Values without an order."""

    values: tuple[object, ...]


@dataclass(frozen=True, kw_only=True)
class Numbers:
    """Ascending values of a number; beyond them it halves or doubles."""

    values: tuple[float, ...]
    minimum: float = 0
    """Smallest value that the option takes."""
    maximum: float | None = None
    """Largest value that makes a difference; None: the tokens of the longest prompt."""
    odd: bool = False
    """Whether the option takes odd numbers only."""
    auto: bool = False
    """Whether the option also takes `auto`, which is tried, too."""

    @property
    def whole(self) -> bool:
        """Whether the option takes integers."""
        return all(isinstance(value, int) for value in self.values)

    def below(self, value: float, known: Collection[float] = ()) -> float | None:
        """Next smaller value: the nearest known one, else half; None at the minimum."""
        if smaller := [other for other in known if other < value]:
            return max(smaller)
        return self._within(value // 2 if self.whole else value / 2, value, self.minimum)

    def above(self, value: float, tokens: int, known: Collection[float] = ()) -> float | None:
        """Next greater value: the nearest known one, else twice; None at the maximum."""
        if greater := [other for other in known if other > value]:
            return min(greater)
        bound = tokens if self.maximum is None else self.maximum
        step = max(2 * value, 1) if self.whole else 2 * value
        return self._within(step, value, bound)

    def between(self, low: float, high: float) -> float | None:
        """A value in the middle of two, None where they differ by less than a quarter."""
        if high - low < 0.25 * high:
            return None
        middle: float = float(f"{(low + high) / 2:.2g}")
        if self.whole:
            middle = (int(low) + int(high)) // 2
            middle = int(middle) | 1 if self.odd else middle
        return middle if low < middle < high else None

    def _within(self, step: float, value: float, bound: float) -> float | None:
        """A step from `value`, at most to the bound; None where that is no step."""
        reached = max(step, bound) if step < value else min(step, bound)
        if self.odd:
            reached = int(reached) | 1
            reached -= 2 if step > value and reached > bound else 0
        return reached if (step < value) == (reached < value) and reached != value else None


Grid = Mapping[str, Choices | Numbers]
"""Option -> its values."""

SHARES = Numbers(values=(0.0, 0.05, 0.1, 0.2, 0.35, 0.5, 0.7, 1.0), maximum=1)
"""Shares of a budget."""
