"""What to try next for one method, from the scores of what was tried: no model, no files.

A setting is a scorer with its options, an allocator with its options, and whether first and last
tokens are protected. From the default and the published presets, the search goes:

1. every value of every declared grid once, with all else as in the best setting so far;
2. the neighbours of the best setting, one option changed: all other choices, the next smaller and
   greater number. A number at the end of its grid has the neighbour that extends the grid;
3. where no neighbour is better: numbers halfway to the neighbours;
4. what is left of all combinations of the grids, in order.

Each step starts over from the best setting. Where the best number is at an end of what was tried
when all settings are used up, the search goes on beyond that end, with at most as many settings
again. But for those, a search of more settings begins with those of a shorter one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, is_dataclass, replace
from functools import cached_property
from itertools import chain, islice, product
from typing import Any

from kvp.errors import UsageError
from kvp.ranking import Allocator
from kvp.scoring import Scorer
from policies.registry import Choices, Grid, Numbers

ALLOCATOR, PROTECTED = "allocator", "protected"
"""Dimensions of every method besides the options of its scorer."""
FILL = 16
"""Combinations taken at a time when everything near the best setting is known."""


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """One setting of a method."""

    scorer: Scorer | None
    """None for learned policies."""
    allocator: Allocator
    protected: bool


@dataclass(frozen=True, kw_only=True)
class Dimension:
    """One thing that can be changed about a candidate."""

    name: str
    """`kernel`, `allocator`, `ada.safeguard`, `protected`."""
    grid: Choices | Numbers
    part: str = ""
    """`scorer` or `allocator` for one of its options; empty for the two that have no options."""

    def value(self, candidate: Candidate) -> Any:  # noqa: ANN401  # of any option
        """Value of a candidate; None where it has no such option."""
        if self.name == ALLOCATOR:
            return rule_name(candidate.allocator)
        if not self.part:
            return candidate.protected
        owner = getattr(candidate, self.part)
        if self.part == ALLOCATOR and rule_name(owner) != self.name.rpartition(".")[0]:
            return None
        return getattr(owner, self.name.rpartition(".")[2], None)

    def with_value(self, candidate: Candidate, value: object) -> Candidate | None:
        """The candidate with another value; None where options exclude each other."""
        if self.name == ALLOCATOR:
            allocator: Any = next(rule for rule in self.grid.values if rule_name(rule) == value)
            return replace(candidate, allocator=allocator)
        if not self.part:
            return replace(candidate, protected=bool(value))
        option = self.name.rpartition(".")[2]
        try:
            owner = replace(getattr(candidate, self.part), **{option: value})
        except UsageError:
            return None
        return replace(candidate, **{self.part: owner})

    @cached_property
    def values(self) -> tuple[Any, ...]:
        """Values of the grid, `auto` first where the option takes it."""
        if isinstance(self.grid, Numbers):
            return (*(("auto",) if self.grid.auto else ()), *self.grid.values)
        if self.name == ALLOCATOR:
            return tuple(map(rule_name, self.grid.values))
        return self.grid.values


Scores = Mapping[Candidate, float]
"""Score of every setting that was tried, in the order of trying; higher is better."""


@dataclass(frozen=True, kw_only=True)
class Space:
    """Everything that is searched for one method."""

    start: tuple[Candidate, ...]
    """Default and presets, with and without protection as far as both are searched."""
    options: Grid
    """Grids of the scorer's options."""
    allocators: tuple[Allocator, ...]
    """Allocators with their defaults."""
    allocator_options: bool
    """Whether the allocators' options are searched, too."""
    tokens: int
    """Tokens in the cache of the longest prompt: numbers without a bound of their own end there."""

    def dimensions(self, candidate: Candidate) -> list[Dimension]:
        """What can be changed about a candidate."""
        options: Grid = self.options if is_dataclass(candidate.scorer) else {}
        dimensions = [
            Dimension(name=name, grid=grid, part="scorer") for name, grid in options.items()
        ]
        if len(self.allocators) > 1:
            dimensions.append(Dimension(name=ALLOCATOR, grid=Choices(self.allocators)))
        if self.allocator_options:
            rule = rule_name(candidate.allocator)
            dimensions += [
                Dimension(name=f"{rule}.{name}", grid=grid, part=ALLOCATOR)
                for name, grid in getattr(candidate.allocator, "grid", {}).items()
            ]
        protections = tuple(dict.fromkeys(start.protected for start in self.start))
        if len(protections) > 1:
            dimensions.append(Dimension(name=PROTECTED, grid=Choices(protections)))
        return dimensions


def best_of(scores: Scores) -> Candidate:
    """The best setting; of equal ones the first that was tried."""
    return max(scores, key=lambda candidate: scores[candidate])


def next_batch(space: Space, scores: Scores, count: int) -> list[Candidate]:
    """Settings to try next; none when `count` are known and no end is open, or no more exist."""
    if not scores:
        return list(space.start)[:count]
    if len(scores) >= count:
        beyond = chain.from_iterable(values_beyond(space, scores).values())
        return list(islice(beyond, max(0, 2 * count - len(scores))))
    best = best_of(scores)
    dimensions = space.dimensions(best)
    steps = (
        _unseen_settings(dimensions, best, scores),
        (
            dimension.with_value(best, value)
            for dimension in dimensions
            for value in _next(space, dimension, best, scores)
        ),
        _middle_settings(space, dimensions, best, scores),
        _combinations(space, best),
    )
    for step in steps:
        fresh = (setting for setting in step if setting is not None and setting not in scores)
        if batch := list(dict.fromkeys(islice(fresh, min(FILL, count - len(scores))))):
            return batch
    return []


def values_beyond(space: Space, scores: Scores) -> dict[str, list[Candidate]]:
    """Settings beyond the ends at which the best numbers are, by option.

    A number is enclosed when a smaller and a greater one were tried with the same choices (pooling,
    allocator, protection, ...), or where the option ends.
    """
    best = best_of(scores)
    same = _same_choices(space, best, scores)
    by_option = {}
    for dimension in space.dimensions(best):
        value = _number(space, dimension, best, scores)
        if not isinstance(dimension.grid, Numbers) or value is None:
            continue
        known = _numbers(dimension.value(setting) for setting in same)
        values = []
        if min(known) >= value:
            values.append(dimension.grid.step_down(value))
        if max(known) <= value:
            values.append(dimension.grid.step_up(value, space.tokens))
        changed = [dimension.with_value(best, beyond) for beyond in values if beyond is not None]
        if able := [setting for setting in changed if setting is not None]:
            by_option[dimension.name] = able
    return by_option


def _unseen_settings(
    dimensions: Sequence[Dimension], best: Candidate, scores: Scores
) -> Iterator[Candidate]:
    """The first dimension with values that no setting has had: the best setting with each.

    Where options exclude each other, it is the best setting that can have them.
    """
    for dimension in dimensions:
        seen = {dimension.value(setting) for setting in scores}
        unseen = [value for value in dimension.values if value not in seen]
        able = [setting for setting in scores if unseen and dimension.value(setting) is not None]
        for base in (best, *sorted(able, key=lambda setting: -scores[setting])):
            changed = [dimension.with_value(base, value) for value in unseen]
            if settings := [setting for setting in changed if setting is not None]:
                yield from settings
                return


def _next(space: Space, dimension: Dimension, best: Candidate, scores: Scores) -> tuple[Any, ...]:
    """All other choices, or the next smaller and greater number."""
    if isinstance(grid := dimension.grid, Choices):
        return dimension.values
    if (value := _number(space, dimension, best, scores)) is None:
        return ()
    known = {*grid.values, *_numbers(dimension.value(setting) for setting in scores)}
    beside = (grid.step_down(value, known), value, grid.step_up(value, space.tokens, known))
    return tuple(number for number in beside if number is not None)


def _middle_settings(
    space: Space, dimensions: Sequence[Dimension], best: Candidate, scores: Scores
) -> Iterator[Candidate | None]:
    for dimension in dimensions:
        value = _number(space, dimension, best, scores)
        if isinstance(dimension.grid, Numbers) and value is not None:
            for other in _next(space, dimension, best, scores):
                middle = dimension.grid.bisect(min(value, other), max(value, other))
                if middle is not None:
                    yield dimension.with_value(best, middle)


def _combinations(space: Space, best: Candidate) -> Iterator[Candidate | None]:
    """Every combination of the values of all grids; None where options exclude each other."""
    for allocator in space.allocators:
        dimensions = [
            dimension for dimension in space.dimensions(replace(best, allocator=allocator))
            if dimension.name != ALLOCATOR
        ]  # fmt: skip
        for values in product(*(dimension.values for dimension in dimensions)):
            candidate: Candidate | None = replace(best, allocator=allocator)
            for dimension, value in zip(dimensions, values, strict=True):
                candidate = None if candidate is None else dimension.with_value(candidate, value)
            yield candidate


def _number(space: Space, dimension: Dimension, best: Candidate, scores: Scores) -> float | None:
    """Number of the best setting; where that is `auto`, the best number with the same choices."""
    if not isinstance(dimension.grid, Numbers):
        return None
    value: float | None = dimension.value(best)
    if not _numbers([value]):
        same = _same_choices(space, best, scores)
        known = {other: scores[other] for other in same if _numbers([dimension.value(other)])}
        value = dimension.value(best_of(known)) if known else None
    return value


def _numbers(values: Iterator[Any] | Sequence[Any]) -> list[float]:
    return [v for v in values if isinstance(v, int | float) and not isinstance(v, bool)]


def _same_choices(space: Space, best: Candidate, scores: Scores) -> list[Candidate]:
    """Settings with the best one's pooling, allocator, protection and the like."""
    values = [choice.value for choice in space.dimensions(best) if isinstance(choice.grid, Choices)]
    return [setting for setting in scores if all(value(setting) == value(best) for value in values)]


def rule_name(allocator: object) -> str:
    """Name of an allocator without its options, with the file it was made from."""
    name = str(getattr(allocator, "method", type(allocator).__name__))
    return f"{name}:{file}" if (file := getattr(allocator, "file", None)) else name
