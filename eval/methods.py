"""Methods of a run: scorers, each with an allocator, and the full cache."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from inspect import signature
from pathlib import Path
from typing import Any, NamedTuple, cast

from eval.config import NEEDS_POLICIES, check_flag
from eval.policy_arguments import policy_sources
from eval.results.method_setting import MethodSetting
from eval.results.record_names import DEFAULT_VARIANT, SELF_SIZED
from eval.results.records import SETTING_FIELDS, Key, key_of
from eval.results.tuned_settings import TunedSettings, load_settings
from kvp.artifacts.files import digest_json
from kvp.artifacts.manifest import own_code, sha256_file
from kvp.budgets import Budget
from kvp.data.tasks import expand_tasks, find_task
from kvp.errors import UsageError
from kvp.names import ALL_NULLS, FULL, LEARNED, NULLS, TUNED, UNIFORM, check_methods
from kvp.own_packages import NAMES
from kvp.plugins import OptionalParts, user_errors
from kvp.ranking import UNPROTECTED, Allocator, AllocatorParts, Protection, kept_tokens
from kvp.scoring import Scorer
from kvp.specification import Specification, split_method
from policies import load_policy, make_allocator, make_scorer
from policies.base import Component
from policies.controls import Random
from policies.learned import LearnedScorer
from policies.registry import ALLOCATORS, SCORERS, make_method
from policies.sources import INDEX


class Side(NamedTuple):
    """The scorer or the allocator of a method: the object that acts, and how it was named."""

    made: Any = None
    written: Specification | None = None
    """None for an object."""


@dataclass(frozen=True, kw_only=True)
class Method(MethodSetting):
    """A method that runs: its setting, in the names of records, and the sides that act in it."""

    scorer_side: Side = field(default=Side(), compare=False)
    allocator_side: Side = field(default=Side(), compare=False)
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
        return cast(Scorer | None, self.scorer_side.made)

    @property
    def allocator_object(self) -> Allocator | None:
        """What splits the budget over the heads; None: equally."""
        made = None if self.allocator == UNIFORM else self.allocator_side.made
        return cast(Allocator | None, made)

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
MadeMethod = str | tuple[Any, Any]  # its name, or both sides: names or objects, no classes


def make_objects(methods: Sequence[MethodArgument]) -> list[MadeMethod]:
    """Sides of each method, one object for all uses of a class; kvp's own scorers become names."""
    made: dict[int, Any] = {id(SCORERS[name]): name for name in SCORERS}

    def make(side: object, maker: Callable[[Any], object]) -> Any:  # noqa: ANN401
        if not (side is None or isinstance(side, str) or id(side) in made):
            made[id(side)] = maker(side)
        return made.get(id(side), side)

    pairs = (one if isinstance(one, str | tuple) else (one, None) for one in methods)
    return [
        one if isinstance(one, str) else (make(one[0], make_scorer), make(one[1], make_allocator))
        for one in pairs
    ]


def _tuned_path(method: MadeMethod) -> str | None:
    """FILE of `tuned:FILE`, UsageError where it is empty; None for other methods."""
    name, _, path = method.partition(":") if isinstance(method, str) else ("", "", "")
    if name.strip() != TUNED:
        return None
    if not path.strip():
        raise UsageError(f"--methods: {TUNED} needs a file: write {TUNED}:FILE")
    return path.strip()


def build_methods(
    methods: Sequence[MadeMethod],
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
            built += [
                with_allocator(expanded, each)
                for one in (NULLS if scorer == ALL_NULLS else (scorer,))
                for expanded in _expand_scorer(one, policies, seed)
                for each in (allocators if allocator is None else (allocator,))
            ]
    refuse_namesakes(built)
    return tuple(dict.fromkeys(built))


def refuse_namesakes(methods: Iterable[Method]) -> None:
    """Raise UsageError where two scorers or two allocators that differ share a name.

    Those written alike are the same, and objects of one class that are equal (`_identity_of`).
    """
    named: dict[object, Side] = {}
    for method in [one for one in methods if one.scorer is not None]:
        of_scorer = method.scorer_key, method.scorer_side
        for name, (made, written) in (of_scorer, (method.allocator, method.allocator_side)):
            earlier, before = named.setdefault(name, Side(made, written))
            if made is earlier or (written is not None and written == before):
                continue
            hint = "pass the same object twice"
            with user_errors(made, f"--methods: comparing two called {made.name!r} ({hint})"):
                same = type(made) is type(earlier) and bool(
                    _identity_of(made) == _identity_of(earlier)
                )
            if not same:
                what = type(made).__name__ if written is None else written.text
                raise UsageError(
                    f"--methods: {what} and another are both called {made.name!r}: give each a "
                    f"name of its own (policies.base.BaseScorer puts options into it), or {hint}"
                )


def _identity_of(made: object) -> object:
    """What tells objects of a class apart: digest and options, or without digest themselves."""
    digest = OptionalParts(made).digest
    return made if digest is None else (digest, _options_of(made))


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
        sides = [Specification.parse(one, "method") for one in (chosen.scorer, chosen.allocator)]
        for side, own in zip(sides, ({*SCORERS, LEARNED}, ALLOCATORS), strict=True):
            if side.base not in own:
                yield side.name, "+".join(one.name for one in sides)


def _refuse_unnamed(settings: TunedSettings, text: str, given: Iterable[MadeMethod]) -> None:
    """Raise UsageError where a settings file names what is not kvp's own and no caller named."""
    texts = [one for one in given if isinstance(one, str) and _tuned_path(one) is None]
    named = {Specification.split(side).name for one in texts for side in split_method(one) if side}
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
            chosen, kept = with_allocator(method, entry.chosen.allocator), entry.chosen.protected
            yield replace(chosen, protected=kept, tuned=settings, protocol=entry.protocol)


def with_allocator(method: Method, spec: str | Allocator) -> Method:
    """The method with an allocator; UsageError where the two do not go together."""
    assert method.scorer is not None, "the full cache has no allocator"
    try:
        written = Specification.parse(spec, "allocator") if isinstance(spec, str) else None
        _, allocator = make_method(method.scorer, make_allocator(written or spec))
    except UsageError as error:
        raise UsageError(f"--methods, --allocators: {error}") from None
    side, sized = Side(allocator, written), AllocatorParts(allocator).self_sized
    return replace(method, allocator=allocator.name, self_sized=sized, allocator_side=side)


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
        replace(method_of(load_policy(one), written), policy=label, policy_commit=one.commit)
        for label, one in policy_sources(arguments).items()
    ]


def policies_of(methods: Iterable[Method]) -> dict[str, LearnedScorer]:
    """The policies that methods rank with, by label."""
    scorers = {method.policy: method.scorer for method in methods if method.policy}
    return {label: one for label, one in scorers.items() if isinstance(one, LearnedScorer)}


def file_digests(
    policies: Sequence[str], methods: Sequence[Method], tasks: Sequence[str] = ()
) -> dict[str, str]:
    """Digests of the files that results come from: policies by label, else by scorer or allocator.

    A scorer or an allocator that is made from a file has the file's digest as `digest`. The code of
    a user's own scorers, allocators and tasks goes by the name of its module, what their objects
    were made with by `options of NAME`.
    """
    named, loaded = policy_sources(policies).items(), policies_of(methods).items()
    digests = {label: sha256_file(source.folder / INDEX) for label, source in named}
    digests |= {label: scorer.digest for label, scorer in loaded if scorer.digest}
    made = [side for method in methods for side in (method.scorer, method.allocator_object) if side]
    for one in (*made, *map(find_task, expand_tasks(tasks))):
        if not isinstance(one, LearnedScorer) and (digest := OptionalParts(one).digest):
            digests[one.name] = digest
        digests |= own_code([module := type(one).__module__])
        told = isinstance(one, Component) or module.split(".")[0] in ("kvp", *NAMES)
        if not told and (options := _options_of(one)):
            digests[f"options of {one.name}"] = digest_json(options)
    return digests


def _options_of(made: object) -> dict[str, str]:
    """Arguments that an object was made with, where it keeps them: text of what JSON can hold."""
    kept = {name.removeprefix("_"): value for name, value in getattr(made, "__dict__", {}).items()}
    text = partial(json.dumps, default=lambda value: type(value).__name__, skipkeys=True)
    return {name: text(kept[name]) for name in signature(type(made)).parameters if name in kept}
