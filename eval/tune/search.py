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
            allocator: Any = next(each for each in self.grid.values if rule_name(each) == value)
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
        scorer = candidate.scorer if is_dataclass(candidate.scorer) else None
        options: Grid = {} if scorer is None else self.options
        found = [Dimension(name=name, grid=grid, part="scorer") for name, grid in options.items()]
        if len(self.allocators) > 1:
            found.append(Dimension(name=ALLOCATOR, grid=Choices(self.allocators)))
        if self.allocator_options:
            found += [
                Dimension(
                    name=f"{rule_name(candidate.allocator)}.{name}", grid=grid, part=ALLOCATOR
                )
                for name, grid in getattr(candidate.allocator, "grid", {}).items()
            ]
        protections: tuple[bool, ...] = tuple(dict.fromkeys(each.protected for each in self.start))
        if len(protections) > 1:
            found.append(Dimension(name=PROTECTED, grid=Choices(protections)))
        return found


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
            one.with_value(best, value)
            for one in dimensions
            for value in _next(space, one, best, scores)
        ),
        (each for one in dimensions for each in _middle_settings(space, one, best, scores)),
        _combinations(space, best),
    )
    for step in steps:
        fresh = (each for each in step if each is not None and each not in scores)
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
    found = {}
    for one in space.dimensions(best):
        value = _number(space, one, best, scores)
        if not isinstance(one.grid, Numbers) or value is None:
            continue
        known = _numbers(one.value(each) for each in same)
        values = []
        if min(known) >= value:
            values.append(one.grid.step_down(value))
        if max(known) <= value:
            values.append(one.grid.step_up(value, space.tokens))
        changed = [one.with_value(best, beyond) for beyond in values if beyond is not None]
        if able := [each for each in changed if each is not None]:
            found[one.name] = able
    return found


def _unseen_settings(
    dimensions: Sequence[Dimension], best: Candidate, scores: Scores
) -> Iterator[Candidate]:
    """The first dimension with values that no setting has had: the best setting with each.

    Where options exclude each other, it is the best setting that can have them.
    """
    for one in dimensions:
        seen = {one.value(each) for each in scores}
        unseen = [value for value in one.values if value not in seen]
        able = [each for each in scores if one.value(each) is not None] if unseen else []
        for base in (best, *sorted(able, key=lambda each: -scores[each])):
            changed = [one.with_value(base, value) for value in unseen]
            if found := [each for each in changed if each is not None]:
                yield from found
                return


def _next(space: Space, one: Dimension, best: Candidate, scores: Scores) -> tuple[Any, ...]:
    """All other choices, or the next smaller and greater number."""
    if isinstance(one.grid, Choices):
        return one.values
    if (value := _number(space, one, best, scores)) is None:
        return ()
    known = {*one.grid.values, *_numbers(one.value(each) for each in scores)}
    beside = (one.grid.step_down(value, known), value, one.grid.step_up(value, space.tokens, known))
    return tuple(each for each in beside if each is not None)


def _middle_settings(
    space: Space, one: Dimension, best: Candidate, scores: Scores
) -> Iterator[Candidate | None]:
    value = _number(space, one, best, scores)
    if not isinstance(one.grid, Numbers) or value is None:
        return
    for other in _next(space, one, best, scores):
        middle = one.grid.bisect(min(value, other), max(value, other))
        if middle is not None:
            yield one.with_value(best, middle)


def _combinations(space: Space, best: Candidate) -> Iterator[Candidate | None]:
    """Every combination of the values of all grids; None where options exclude each other."""
    for allocator in space.allocators:
        dimensions = [
            one for one in space.dimensions(replace(best, allocator=allocator))
            if one.name != ALLOCATOR
        ]  # fmt: skip
        for values in product(*(one.values for one in dimensions)):
            candidate: Candidate | None = replace(best, allocator=allocator)
            for one, value in zip(dimensions, values, strict=True):
                candidate = None if candidate is None else one.with_value(candidate, value)
            yield candidate


def _number(space: Space, one: Dimension, best: Candidate, scores: Scores) -> float | None:
    """Number of the best setting; where that is `auto`, the best number with the same choices."""
    if not isinstance(one.grid, Numbers):
        return None
    value = one.value(best)
    if not _numbers([value]):
        same = [each for each in _same_choices(space, best, scores) if _numbers([one.value(each)])]
        value = one.value(best_of({each: scores[each] for each in same})) if same else None
    number: float | None = value
    return number


def _numbers(values: Iterator[Any] | Sequence[Any]) -> list[float]:
    return [v for v in values if isinstance(v, int | float) and not isinstance(v, bool)]


def _same_choices(space: Space, best: Candidate, scores: Scores) -> list[Candidate]:
    """Settings with the best one's pooling, allocator, protection and the like."""
    choices = [one for one in space.dimensions(best) if isinstance(one.grid, Choices)]
    return [each for each in scores if all(one.value(each) == one.value(best) for one in choices)]


def rule_name(allocator: object) -> str:
    """Name of an allocator without its options, with the file it was made from."""
    name = str(getattr(allocator, "method", type(allocator).__name__))
    return f"{name}:{file}" if (file := getattr(allocator, "file", None)) else name
