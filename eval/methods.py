"""Methods of a run: scorers, each with an allocator, and the full cache."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain, product
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar

from eval.config import NEEDS_POLICIES, check_flag
from eval.policy_arguments import policy_sources
from eval.results.method_setting import MethodSetting
from eval.results.record_names import DEFAULT_VARIANT, SELF_SIZED
from eval.results.records import SETTING_FIELDS, Key, key_of
from eval.results.tuned_settings import TunedSettings, load_settings
from kvp.allocation import Allocator, AllocatorParts
from kvp.budgets import Budget
from kvp.errors import UsageError
from kvp.names import ALL_NULLS, FULL, LEARNED, NULLS, TUNED, UNIFORM, check_methods
from kvp.plugins import identity_of, user_errors
from kvp.protection import UNPROTECTED, Protection, kept_tokens
from kvp.scoring import Scorer
from kvp.specification import Specification, split_method
from policies import load_policy, make_allocator, make_scorer
from policies.controls import Random
from policies.learned import LearnedScorer
from policies.registry import ALLOCATORS, SCORERS, make_method

ComponentT = TypeVar("ComponentT")


class Side(NamedTuple, Generic[ComponentT]):
    """The scorer or the allocator of a method, and how it was named."""

    component: ComponentT
    written: Specification | None
    """None for an object."""


@dataclass(frozen=True, kw_only=True)
class Method(MethodSetting):
    """A method that runs: its setting, in the names of records, and both of its sides."""

    scorer_side: Side[Scorer] | None = field(default=None, compare=False)
    """None for the full cache."""
    allocator_side: Side[Allocator] | None = field(default=None, compare=False)
    tuned: TunedSettings | None = None
    """The file with which kvp tune chose it, for one protocol and with or without protection."""
    protocol: str | None = None
    """The protocol that it was chosen for; None: it is run under every one."""
    budget: Budget | None = None
    """Tokens to keep; None for the full cache, and where the method sizes the cache itself."""
    protection: Protection = UNPROTECTED

    def at(self, budget: Budget | None, protection: Protection, protected: bool) -> Method:
        """The method at a budget, with `protection` (it may be of no tokens) if `protected`."""
        kept = protection if protected else UNPROTECTED
        return replace(self, protected=protected, budget=budget, protection=kept)

    @property
    def scorer(self) -> Scorer | None:
        """What ranks the tokens; None for the full cache."""
        return self.scorer_side and self.scorer_side.component

    @property
    def allocator(self) -> Allocator | None:
        """What splits the budget over the heads; None: equally."""
        if self.allocator_side is None or self.allocator_name == UNIFORM:
            return None
        return self.allocator_side.component

    @property
    def budget_spec(self) -> str | None:
        """The budget as records have it."""
        if self.budget is not None:
            return str(self.budget)
        return SELF_SIZED if self.self_sized else None

    @property
    def key(self) -> Key:
        """Its values of `SETTING_FIELDS`, as records have them."""
        return key_of({**self.fields, "budget_spec": self.budget_spec}, SETTING_FIELDS)

    def tokens(self, cached: int) -> int:
        """Tokens per KV head that it may keep of `cached` ones, all of them without a budget."""
        return cached if self.budget is None else kept_tokens(self.budget, cached, self.protection)

    def shrinks(self, cached: int) -> bool:
        """Whether it may evict some of `cached` tokens."""
        return self.self_sized or self.tokens(cached) < cached


MethodArgument = str | Scorer | type[Scorer] | tuple[Scorer | type[Scorer], Allocator | None]
"""A method as Python callers give it."""
NamedOrMade = str | tuple[str | Scorer, str | Allocator | None]
"""A method by name, or its two sides, by name or as objects, not as classes."""


def make_objects(methods: Sequence[MethodArgument]) -> list[NamedOrMade]:
    """Make one object of all uses of a class; kvp's own scorers are named instead."""
    objects: dict[int, Any] = {id(kind): name for name, kind in SCORERS.items()}

    def make(side: object, build: Callable[[Any], object]) -> Any:  # noqa: ANN401
        if side is None or isinstance(side, str):
            return side
        if id(side) not in objects:
            objects[id(side)] = build(side)
        return objects[id(side)]

    made: list[NamedOrMade] = []
    for method in methods:
        scorer, allocator = method if isinstance(method, tuple) else (method, None)
        sides = make(scorer, make_scorer), make(allocator, make_allocator)
        made.append(method if isinstance(method, str) else sides)
    return made


def spell(method: NamedOrMade) -> str:
    """The method as `--methods` has it, with the names of its objects."""
    sides: Sequence[Any] = (method,) if isinstance(method, str) else method
    return "+".join(getattr(side, "name", side) for side in sides if side is not None)


def _tuned_path(method: NamedOrMade) -> str | None:
    """FILE of `tuned:FILE`, UsageError where it is empty; None for other methods."""
    name, _, path = method.partition(":") if isinstance(method, str) else ("", "", "")
    if name.strip() != TUNED:
        return None
    if not path.strip():
        raise UsageError(f"--methods: {TUNED} needs a file: write {TUNED}:FILE")
    return path.strip()


def build_methods(
    methods: Sequence[NamedOrMade],
    *,
    allocators: Sequence[str] = (UNIFORM,),
    policies: Sequence[str] = (),
    seed: int = 0,
) -> tuple[Method, ...]:
    """Methods of a run, in the order given; two spellings of one method count once.

    `methods` are `full`, SCORER, SCORER+ALLOCATOR, `nulls` (`NULLS`), `tuned:FILE`, or pairs of
    `make_objects`, which takes objects and classes; `allocators` are for those that name none,
    `policies` for `kvp` (`policy_sources`), `seed` for random ones. Raises UsageError on
    what is unknown, does not go together or shares a name, PolicyError on a damaged policy.
    """
    built: list[Method] = []
    for method in methods:
        scorer, allocator = split_method(method) if isinstance(method, str) else method
        if (path := _tuned_path(method)) is not None:
            settings = load_settings(path)
            _refuse_unnamed(settings, str(method), [*methods, *allocators])
            built += _tuned_methods(settings, policies, seed)
        elif scorer == FULL:
            if allocator is not None:
                raise UsageError(f"--methods {method}: the full cache has no allocator")
            built.append(Method(method=FULL))
        else:
            names = NULLS if scorer == ALL_NULLS else (scorer,)
            expanded = chain.from_iterable(_expand_scorer(name, policies, seed) for name in names)
            splits = allocators if allocator is None else (allocator,)
            built += [with_allocator(*pair) for pair in product(expanded, splits)]
    refuse_namesakes(built)
    return tuple(dict.fromkeys(built))


def refuse_namesakes(methods: Iterable[Method]) -> None:
    """Raise UsageError where two scorers or two allocators that differ share a name.

    Those written alike are the same, and objects of one class that are equal (`identity_of`).
    """
    named: dict[object, Side[Any]] = {}
    for method in methods:
        scorer = method.scorer_key, method.scorer_side
        for name, side in (scorer, (method.allocator_name, method.allocator_side)):
            if side is None:
                continue
            component, written = side
            earlier = named.setdefault(name, side)
            if component is earlier.component or (written and written == earlier.written):
                continue
            called, hint = f"called {component.name!r}", "pass the same object twice"
            with user_errors(component, f"--methods: comparing two {called} ({hint})"):
                ours, theirs = identity_of(component), identity_of(earlier.component)
                alike = type(component) is type(earlier.component) and bool(ours == theirs)
            if not alike:
                what = written.text if written else type(component).__name__
                raise UsageError(
                    f"--methods: {what} and another are both {called}: give each a name of its own "
                    f"(policies.base.BaseScorer puts options into it), or {hint}"
                )


def _expand_scorer(scorer: str | Scorer, policies: Sequence[str], seed: int) -> list[Method]:
    """Methods of a scorer, without allocator: several for `kvp`, one for others."""
    if scorer == LEARNED:
        return learned_methods(policies)
    if isinstance(scorer, str):
        check_methods([scorer], "methods")
    return [check_flag("methods", partial(registered_method, seed=seed), scorer)]


def foreign_names(settings: TunedSettings) -> Iterator[tuple[str, str]]:
    """Names in a settings file that are not kvp's own, each with its SCORER+ALLOCATOR."""
    for chosen in (entry.chosen for entry in settings.methods):
        scorer = Specification.parse(chosen.scorer, "method")
        allocator = Specification.parse(chosen.allocator, "allocator")
        for side, own in ((scorer, {*SCORERS, LEARNED}), (allocator, ALLOCATORS)):
            if side.base not in own:
                yield side.name, f"{scorer.name}+{allocator.name}"


def _refuse_unnamed(settings: TunedSettings, text: str, given: Iterable[NamedOrMade]) -> None:
    """Raise UsageError where a settings file names what is not kvp's own and no caller named."""
    texts = [text for text in given if isinstance(text, str) and _tuned_path(text) is None]
    sides = chain.from_iterable(map(split_method, texts))
    named = {Specification.split(side).name for side in sides if side}
    for name, method in foreign_names(settings):
        if name not in named:
            raise UsageError(
                f"--methods {text} names {name}, which is not kvp's own: nothing is imported "
                f"because a file says so; if you trust it, name it: --methods {method},{text}"
            )


def _tuned_methods(settings: TunedSettings, policies: Sequence[str], seed: int) -> Iterator[Method]:
    """The settings that kvp tune chose, for `kvp` one method per policy."""
    for entry in settings.methods:
        for method in _expand_scorer(entry.chosen.scorer, policies, seed):
            chosen = with_allocator(method, entry.chosen.allocator)
            protected = entry.chosen.protected
            yield replace(chosen, protected=protected, tuned=settings, protocol=entry.protocol)


def with_allocator(method: Method, spec: str | Allocator) -> Method:
    """The method with an allocator; UsageError where the two do not go together."""
    assert method.scorer is not None, "the full cache has no allocator"
    try:
        written = Specification.parse(spec, "allocator") if isinstance(spec, str) else None
        _, allocator = make_method(method.scorer, make_allocator(written or spec))
    except UsageError as error:
        raise UsageError(f"--methods, --allocators: {error}") from None
    side, sized = Side(allocator, written), AllocatorParts(allocator).self_sized
    return replace(method, allocator_name=allocator.name, self_sized=sized, allocator_side=side)


def registered_method(spec: str | Scorer, seed: int) -> Method:
    """A method by name, or of an object; random ones that name no seed draw from the run's."""
    written = Specification.parse(spec, "method") if isinstance(spec, str) else None
    method = method_of(scorer := make_scorer(written or spec), written)
    if isinstance(scorer, Random) and scorer.seed == 0 != seed:
        if written and "seed" not in written.options:
            return replace(method, scorer_side=Side(replace(scorer, seed=seed), written))
        options = filter(None, (scorer.changed_options, "seed=0"))  # which a name leaves out
        return replace(method, variant=",".join(options))
    return method


def method_of(scorer: Scorer, written: Specification | None = None) -> Method:
    """A scorer by its registered name: `name`, `name:preset` or `name(option=value)`.

    A policy is called like its folder.
    """
    named, side = Specification.split(scorer.name), Side(scorer, written)
    method = Method(method=named.base, variant=named.variant or DEFAULT_VARIANT, scorer_side=side)
    if isinstance(scorer, LearnedScorer):
        seed = scorer.metadata.get("training", {}).get("seed")
        method = replace(method, policy=Path(scorer.label).name, policy_seed=seed)
    return method


def learned_methods(arguments: Sequence[str]) -> list[Method]:
    """One `kvp` method per policy of `--policies`, with distinct labels."""
    if not arguments:
        raise UsageError(NEEDS_POLICIES)
    written = Specification.parse(LEARNED, "method")
    return [
        replace(method_of(load_policy(source), written), policy=label, policy_commit=source.commit)
        for label, source in policy_sources(arguments).items()
    ]


def policies_of(methods: Iterable[Method]) -> dict[str, LearnedScorer]:
    """The policies that methods rank with, by label."""
    scorers = {method.policy: method.scorer for method in methods if method.policy}
    return {name: scorer for name, scorer in scorers.items() if isinstance(scorer, LearnedScorer)}
