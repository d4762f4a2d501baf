"""What to try next for one method, from the scores of what was tried: no model, no files.

From the default and the published presets on, the search tries

1. every allocator once, then every value of the other grids (the scorer's options, the allocator's,
   protection), with all else as in the best setting so far;
2. the neighbours of the best setting: one value changed to another choice, or to the next smaller
   or greater number of its grid; beyond the ends of a grid, numbers are halved and doubled;
3. where none of them is better: numbers halfway to the neighbours;
4. the neighbours of the next best setting, and so on.

It starts over from the best setting after every batch. Where a number of the best is at an end
when all settings are used up, the search goes on beyond it, with at most as many settings again.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from operator import attrgetter
from typing import Any

from eval.methods import Method, method_of, with_allocator
from eval.results.tuned_settings import ScoredSetting, TunedMethod
from kvp.errors import UsageError
from kvp.ranking import Allocator
from policies.base import Component, Grid
from policies.registry import ALLOCATORS, FROM_OUTSIDE, SCORERS


@dataclass(frozen=True, kw_only=True)
class Search:
    """The search of one method, policy seeds together, under one protocol."""

    requested: str
    """As written in `--methods`."""
    scorer: str
    """Its scorer alone."""
    seeds: tuple[Method, ...]
    """The method with its defaults; one per policy seed."""
    start: tuple[Method, ...]
    """Default and presets, with and without protection as far as both are searched."""
    options: Grid
    """Options of the scorer that are searched, with the values to try first."""
    allocators: Mapping[str, Allocator]
    """By their specifications."""
    searches_allocator: bool
    """Whether the allocator's options are searched: not where it was named with the method."""
    tokens: int
    """Tokens of the longest prompt: no number is doubled to more."""
    protocol: str = ""
    """`query_aware` or `query_agnostic`, empty until the search is copied for each."""
    scored: dict[Method, ScoredSetting] = field(default_factory=dict)
    """What was tried so far, in order; a higher score is better."""

    @property
    def tuned(self) -> TunedMethod:
        """What was chosen, and from how many."""
        return TunedMethod(
            method=self.seeds[0].method, requested=self.requested, protocol=self.protocol,
            chosen=max(self.scored.values(), key=lambda scored: scored.score),
            published=tuple(filter(None, map(self.scored.get, self.start))), tried=len(self.scored),
        )  # fmt: skip

    def spec(self, method: Method) -> str:
        """Specification of a setting's scorer, for `--methods`."""
        written = self.seeds[0].written[0]
        if method.scorer is None or written is None or method.ranking == self.seeds[0].ranking:
            return self.scorer
        if written.base in (*SCORERS, *FROM_OUTSIDE):
            return method.scorer.name
        assert isinstance(method.scorer, Component)  # no other scorer has settings
        return f"{written.name}({method.scorer.changed_options})"

    def allocator_spec(self, method: Method) -> str:
        """Specification of a setting's allocator, for `--methods`."""
        made = method.allocator_object
        if made is None or type(made) in ALLOCATORS.values():
            return method.allocator
        own = {one.name: text for text, one in self.allocators.items() if type(one) is type(made)}
        kind, options = next(iter(own.values())).partition("(")[0], getattr(made, "changes", "")
        return own.get(made.name) or f"{kind}({options})".removesuffix("()")

    def grids(self, setting: Method) -> dict[str, Sequence[Any]]:
        """Values to try, by the attribute of the setting that has them, such as `scorer.kernel`."""
        searched = self.searches_allocator and isinstance(setting.allocator_object, Component)
        options = getattr(setting.allocator_object, "grid", {}) if searched else {}
        return {
            "allocator_object": tuple(self.allocators.values()),
            **{f"scorer.{name}": values for name, values in self.options.items()},
            **{f"allocator_object.{name}": values for name, values in options.items()},
            "protected": tuple(dict.fromkeys(one.protected for one in self.start)),
        }


def next_batch(search: Search, count: int) -> list[Method]:
    """Settings to try next; none if all were tried, or `count` and the best is at no end."""
    scored = search.scored
    if not scored:
        return list(search.start)[:count]
    ranked = sorted(scored, key=lambda setting: -scored[setting].score)  # of equal ones the first
    steps: Iterable[Iterable[Method | None]]
    if len(scored) < count:
        unseen = (_unseen(search, ranked, name) for name in search.grids(ranked[0]))
        near = (_neighbours(search, ranked[0], halfway=halfway) for halfway in (False, True))
        steps = chain(unseen, near, (_neighbours(search, setting) for setting in ranked))
    else:
        steps, count = (_neighbours(search, ranked[0], tried=scored),), 2 * count
    for step in steps:
        if fresh := dict.fromkeys(one for one in step if one is not None and one not in scored):
            return list(fresh)[: count - len(scored)]
    return []


def _with_value(setting: Method, name: str, value: Any) -> Method | None:  # noqa: ANN401  # any option
    """The setting with another value, with 9 for 8 where only odd ones are valid; else None."""
    owner, _, option = name.partition(".")
    try:
        made = replace(getattr(setting, owner), **{option: value}) if option else value
    except UsageError:
        even = type(value) is int and value % 2 == 0
        return _with_value(setting, name, value + 1) if even else None
    if owner == "allocator_object":
        return with_allocator(setting, made)
    if option:
        return replace(setting, scorer=made, variant=method_of(made).variant)
    return replace(setting, protected=made)


def _unseen(search: Search, ranked: Sequence[Method], name: str) -> Sequence[Method | None]:
    """The best setting that has `name`, with each value not tried: kernel=9 after 5 and 7."""
    kind = type(ranked[0].allocator_object)
    alike = [one for one in ranked if type(one.allocator_object) is kind]
    able = alike if name.startswith("allocator_object.") else ranked
    seen = list(map(attrgetter(name), able))
    values = [value for value in search.grids(ranked[0])[name] if value not in seen]
    changed = ([_with_value(one, name, value) for value in values] for one in able)
    return next(filter(any, changed), ())


def _neighbours(
    search: Search, setting: Method, *, halfway: bool = False, tried: Iterable[Method] | None = None
) -> Iterator[Method | None]:
    """The setting with one value changed: to other choices, to the next numbers or halfway there.

    With `tried`, only to numbers beyond all that were tried with the same allocator.
    """
    kind = type(setting.allocator_object)
    alike = [one for one in tried or () if type(one.allocator_object) is kind]
    for name, values in search.grids(setting).items():
        value = attrgetter(name)(setting)
        numbers = list(filter(_is_number, values))
        if tried is None:
            yield from (_with_value(setting, name, one) for one in values if one not in numbers)
        if not _is_number(value):
            continue
        half = value // 2 if isinstance(value, int) else value / 2
        smaller = max((one for one in numbers if one < value), default=half)
        greater = min((one for one in numbers if one > value), default=2 * value)
        known = list(filter(_is_number, map(attrgetter(name), alike)))
        steps = [smaller] if min(known, default=value) >= value else []
        if max(known, default=value) <= value and (greater in numbers or greater <= search.tokens):
            steps.append(greater)
        if halfway:
            middle = [float(f"{(value + step) / 2:.2g}") for step in steps]
            steps = [int(step) for step in middle] if isinstance(value, int) else middle
        yield from (_with_value(setting, name, step) for step in steps)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
