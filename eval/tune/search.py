"""A local search for the best setting of one method, on the scores of its trials: no model.

A trial is a setting that was measured. Each round proposes candidates, which are measured together.
The first round has the default and the published presets. A later one takes the first of these
steps that has candidates which were not tried:

1. Another value for one option of the best setting, option by option: all allocators; then every
   kernel of its grid with the best allocator; then every window with the best kernel, and so on.
2. The neighbours of the best setting: one option has another choice, or the next number of its
   grid. Beyond the ends of a grid numbers are halved and doubled.
3. Numbers halfway to the neighbours.
4. The neighbours of the second best setting, of the third best, and so on.

Where an option of the best setting has the least or the largest number that was tried when all
trials are used up, the search goes on beyond it, with at most as many trials again.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from typing import Any, Literal, NamedTuple

from eval.methods import Method, learned_methods, method_of, registered_method, with_allocator
from eval.prepared_run import protected_tokens, protections
from eval.results.method_setting import group_policies
from eval.results.tuned_settings import ScoredSetting, TunedMethod
from eval.tune.config import TuneConfig
from kvp.allocation import Allocator, AllocatorParts
from kvp.errors import UsageError
from kvp.names import ALL_NULLS, FULL, LEARNED, NULLS, TUNED, UNIFORM
from kvp.scoring import Scorer
from kvp.specification import Specification, split_method
from policies import make_allocator
from policies.base import Component, Grid
from policies.registry import ALLOCATORS, SCORERS


class Option(NamedTuple):
    """What a search changes: an option of a part of settings, or without a name the part itself."""

    part: Literal["scorer", "allocator", "protected"]
    name: str = ""

    def value(self, setting: Method) -> Any:  # noqa: ANN401
        """What a setting has."""
        part = getattr(setting, self.part)
        return getattr(part, self.name) if self.name else part


@dataclass(frozen=True, kw_only=True)
class SearchSpace:
    """What may be tried for one method: settings, which are methods without a budget."""

    requested: str
    """As written in `--methods`: `snapkv(kernel=7)+ada`."""
    scorer: str
    """Its scorer alone: `snapkv(kernel=7)`."""
    seeds: tuple[Method, ...]
    """The method with its defaults; one per policy seed."""
    initial: tuple[Method, ...]
    """The default and the presets, with and without protection as far as both are searched."""
    scorer_grid: Grid
    """Values of the scorer's options that are searched: of window and pool in this example."""
    allocators: Mapping[str, Allocator]
    """By their specifications."""
    largest: int
    """No number is doubled to more: the tokens of the longest prompt."""

    def scorer_spec(self, setting: Method) -> str:
        """How `--methods` names a setting's scorer: `snapkv(window=16)`, `mine:Mine(step=2)`."""
        if setting.scorer_key == self.seeds[0].scorer_key:
            return self.scorer
        assert isinstance(setting.scorer, Component)  # no other scorer has settings
        written = Specification.split(self.scorer)
        if written.base in SCORERS:
            return setting.scorer.name
        return f"{written.name}({setting.scorer.changed_options})"

    def allocator_spec(self, setting: Method) -> str:
        """How `--allocators` names a setting's allocator: `ada(safeguard=0.1)`, `mine:Even`."""
        allocator = setting.allocator
        if allocator is None or type(allocator) in ALLOCATORS.values():
            return setting.allocator_name
        pairs = self.allocators.items()
        own = {known.name: text for text, known in pairs if type(known) is type(allocator)}
        name = Specification.split(next(iter(own.values()))).name
        options = getattr(allocator, "changed_options", "")
        return own.get(allocator.name) or f"{name}({options})".removesuffix("()")

    def grids(self, setting: Method) -> dict[Option, Sequence[Any]]:
        """Values to try, by what has them, such as `Option("scorer", "kernel")`."""
        allocator, named = setting.allocator, self.requested != self.scorer
        options: Grid = allocator.grid if isinstance(allocator, Component) and not named else {}
        every = [None if it.name == UNIFORM else it for it in self.allocators.values()]
        return {
            Option("allocator"): every,
            **{Option("scorer", name): values for name, values in self.scorer_grid.items()},
            **{Option("allocator", name): values for name, values in options.items()},
            Option("protected"): [*dict.fromkeys(method.protected for method in self.initial)],
        }


def make_spaces(config: TuneConfig) -> list[SearchSpace]:
    """Spaces of `--methods`; raises UsageError on what cannot be tuned."""
    spaces = []
    for scorer, allocator in map(split_method, config.eval_config.method_list):
        if scorer == FULL or scorer.startswith(f"{TUNED}:"):
            raise UsageError(f"--methods {scorer}: nothing is chosen for it; leave it out")
        for name in NULLS if scorer == ALL_NULLS else (scorer,):
            spaces.append(_make_space(config, name, allocator))
    return spaces


def _make_space(config: TuneConfig, scorer: str, allocator: str | None) -> SearchSpace:
    if scorer == LEARNED:
        seeds = learned_methods(config.eval_config.policy_list)
        if len({*group_policies(seed.fields for seed in seeds).values()}) > 1:
            raise UsageError("--policies: tune policies that differ in more than their seed apart")
    else:
        seeds = [registered_method(scorer, config.seed)]
    requested = scorer if allocator is None else f"{scorer}+{allocator}"
    specs = config.eval_config.allocator_list if allocator is None else (allocator,)
    allocators = {text: make_allocator(text) for text in specs}
    if any(AllocatorParts(allocator).self_sized for allocator in allocators.values()):
        raise UsageError(
            f"--methods {requested} with {' or '.join(specs)}: what ignores the budget is not "
            "tuned; leave it out"
        )
    grid, presets = _searched_options(seeds[0].scorer, scorer)
    first = next(iter(allocators.values()))
    initial = [
        replace(with_allocator(method, first), protected=protected)
        for method in (seeds[0], *presets)
        for protected in protections(config.protection, protected_tokens(config))
    ]
    return SearchSpace(
        requested=requested, scorer=scorer, seeds=tuple(seeds), scorer_grid=grid,
        initial=tuple(dict.fromkeys(initial)), allocators=allocators,
        largest=config.length,
    )  # fmt: skip


def _searched_options(scorer: Scorer | None, text: str) -> tuple[Grid, list[Method]]:
    """Values of the options that the specification leaves open (of `snapkv:paper` none), and the
    presets to begin with, none where it has a preset or an option.
    """
    if not isinstance(scorer, Component):
        return {}, []
    written = Specification.split(text)
    preset = written.argument if written.base in SCORERS else None  # else the name of a class
    fixed = {*written.options, *scorer.presets.get(preset or "", {})}
    presets = () if written.options or preset else scorer.presets
    grid = {name: values for name, values in scorer.grid.items() if name not in fixed}
    return grid, [method_of(scorer.build(name, {})) for name in presets]


@dataclass(frozen=True, kw_only=True)
class Search:
    """One method under one protocol: what may be tried, and what was measured so far."""

    space: SearchSpace
    protocol: str
    trials: dict[Method, ScoredSetting] = field(default_factory=dict)
    """Settings that were measured, in order; a higher score is better."""

    @property
    def result(self) -> TunedMethod:
        """The best setting, and from how many it was chosen."""
        return TunedMethod(
            method=self.space.seeds[0].method,
            requested=self.space.requested,
            protocol=self.protocol,
            tried=len(self.trials),
            chosen=max(self.trials.values(), key=lambda scored: scored.score),
            published=tuple(filter(None, map(self.trials.get, self.space.initial))),
        )


def next_candidates(search: Search, count: int) -> list[Method]:
    """Candidates of the next round; none after `count` trials (or more, where the best number is at
    an end), or where nothing is left to try.
    """
    space, trials = search.space, search.trials
    if not trials:
        return list(space.initial)[:count]
    ranked = sorted(trials, key=lambda setting: -trials[setting].score)  # of equal ones the first
    best, *others = ranked
    kind = type(best.allocator)
    peers = [setting for setting in ranked if type(setting.allocator) is kind]
    steps: Iterable[Iterable[Method | None]]
    if len(trials) < count:
        grids = space.grids(best)
        having = [peers if it.part == "allocator" and it.name else ranked for it in grids]
        values = map(partial(_untried_values, space), having, grids)
        near = (_neighbours(space, best), _halfway(space, best))
        steps = chain(values, near, (_neighbours(space, other) for other in others))
    else:
        steps, count = (_beyond(space, peers),), 2 * count
    for step in steps:
        if new := [it for it in dict.fromkeys(step) if it is not None and it not in trials]:
            return new[: count - len(trials)]
    return []


def _untried_values(
    space: SearchSpace, ranked: Sequence[Method], option: Option
) -> Sequence[Method | None]:
    """The best setting, or the next that can have it, with every untried value of an option."""
    tried = list(map(option.value, ranked))
    values = [value for value in space.grids(ranked[0])[option] if value not in tried]
    changed = ([_with_value(setting, option, value) for value in values] for setting in ranked)
    return next(filter(any, changed), ())


def _neighbours(space: SearchSpace, setting: Method) -> Iterator[Method | None]:
    """The setting with one option changed to another choice or to the next number."""
    return (_with_value(setting, option, new) for option, _, new in _changes(space, setting))


def _halfway(space: SearchSpace, setting: Method) -> Iterator[Method | None]:
    """The setting with one number halfway to the next, in two digits: kernel=11 for 7 and 15."""
    for option, value, new in _changes(space, setting):
        if _is_number(new):
            yield _with_value(setting, option, type(value)(float(f"{(value + new) / 2:.2g}")))


def _beyond(space: SearchSpace, ranked: Sequence[Method]) -> Iterator[Method | None]:
    """The best setting with one number beyond those of all: kernel=127 where 63 is the largest."""
    for option, value, new in _changes(space, ranked[0]):
        if _is_number(new):
            tried = filter(_is_number, map(option.value, ranked))
            if value == (min(tried) if new < value else max(tried)):
                yield _with_value(ranked[0], option, new)


def _changes(space: SearchSpace, setting: Method) -> Iterator[tuple[Option, Any, Any]]:
    """Options of a setting, with their value and a new one: every choice and the next numbers.

    With kernel=7: (kernel, 7, 3), (kernel, 7, 15); with pool=max: (pool, "max", "avg"). Next to
    the ends of a grid are half and twice its number, up to `largest`.
    """
    for option, values in space.grids(setting).items():
        value = option.value(setting)
        yield from ((option, value, choice) for choice in values if not _is_number(choice))
        if _is_number(value):
            numbers = list(filter(_is_number, values))
            half = value // 2 if isinstance(value, int) else value / 2
            yield option, value, max((it for it in numbers if it < value), default=half)
            greater = min((it for it in numbers if it > value), default=2 * value)
            if greater in numbers or greater <= space.largest:
                yield option, value, greater


def _with_value(setting: Method, option: Option, value: Any) -> Method | None:  # noqa: ANN401
    """The setting with another value, with 9 for 8 where only odd ones are valid; else None."""
    part, name = option
    try:
        changed = replace(getattr(setting, part), **{name: value}) if name else value
    except UsageError:
        even = type(value) is int and value % 2 == 0
        return _with_value(setting, option, value + 1) if even else None
    if part == "allocator":
        return with_allocator(setting, UNIFORM if changed is None else changed)
    if part == "scorer":
        new = method_of(changed)
        return replace(setting, scorer_side=new.scorer_side, variant=new.variant)
    return replace(setting, protected=changed)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
