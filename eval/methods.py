"""Methods of a run: scorers, each with an allocator, and the full cache; and their settings.

A `Method` is one line of a results table: a scorer (registered, a learned policy, or an object)
with an allocator that splits the budget over the heads. A `Setting` is a method with or without
protection, at one budget; it gives one record per prompt and protocol.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from eval.config import TUNED, tuned_files
from eval.results.records import (
    FULL,
    LEARNED,
    SELF_SIZED,
    SETTING_FIELDS,
    UNIFORM,
    Key,
    key_of,
    method_label,
    without_seed,
)
from eval.tune.tuned_settings import Scored, Tuned, load_settings
from kvp.artifacts.manifest import sha256_file
from kvp.budgets import Budget
from kvp.errors import PolicyError, UsageError
from kvp.geometry import Geometry, check_geometry
from kvp.program import names as known_names
from kvp.program.settings import ProtectionConfig
from kvp.ranking import UNPROTECTED, Allocator, Protection, kept_tokens
from kvp.scoring import Scorer
from policies import load_policy, make_allocator, make_scorer, sizes_itself, split_method
from policies.allocators.evolved import Evolved, budget_path
from policies.base import Options
from policies.controls import Random
from policies.kvzap import KVzap
from policies.learned import LearnedScorer
from policies.registry import ALLOCATORS, METHODS, NULLS, Specification, make_method, parse
from policies.sources import INDEX, PolicySource, find_policy

ALL_NULLS = "nulls"
"""What `--methods` calls all scorers that score nothing."""


@dataclass(frozen=True, kw_only=True)
class Method:
    """A way to choose tokens."""

    name: str
    """Registered name, `kvp` or `full`."""
    variant: str = "auto"
    """Preset or options of a method, `auto` for its defaults."""
    allocator: str = UNIFORM
    """Full name of the rule that splits the budget over the heads."""
    self_sized: bool = False
    """Whether that rule decides by itself how many tokens to keep, whatever the budget."""
    policy: str | None = None
    """Label of the policy directory of `kvp`."""
    policy_seed: int | None = None
    """Training seed of the policy, where its manifest records it."""
    policy_commit: str | None = None
    """Commit of a policy of the hub."""
    scorer: Scorer | None = field(default=None, compare=False)
    """The scorer that ranks the tokens; None for the full cache."""
    rule: Allocator | None = field(default=None, compare=False)
    """The allocator that splits the budget; None: equally."""
    protocol: str | None = None
    """The protocol it is run under, for a setting that kvp tune chose; None: every one."""
    protected: bool | None = None
    """Whether first and last tokens are kept, as kvp tune chose; None: as `--protection` says."""

    @property
    def label(self) -> str:
        """Name of the method in one word: `snapkv:kvpress`, `kvp/seed0+ada`."""
        named = f"{self.name}/{self.policy}" if self.policy else self.name
        return method_label(named, self.variant, self.allocator)

    @property
    def ranking(self) -> tuple[str, str, str | None]:
        """Identity without the allocator: equal for methods with the same scores."""
        return self.name, self.variant, self.policy


Given = str | Scorer | type[Scorer] | tuple[Scorer, Allocator | None]
"""A method as a caller may give it: a name, an object or a class of scorers, or what `make_method`
makes, a scorer and an allocator."""


def protected_tokens(config: ProtectionConfig) -> Protection:
    """What protection keeps of each prompt."""
    return Protection(sinks=config.sinks, recents=config.recents)


def build_methods(
    methods: Sequence[Given],
    *,
    allocators: Sequence[str] = (UNIFORM,),
    policies: Sequence[str] = (),
    seed: int = 0,
) -> tuple[Method, ...]:
    """Methods of a run, in the order given; two spellings of one method count once.

    Args:
        methods: `full`, SCORER, SCORER+ALLOCATOR, `nulls` for all of `NULLS`, `tuned:FILE`, or
            objects and classes of scorers, also with an allocator as a pair.
        allocators: for every method that names none.
        policies: policies of `kvp`, `POLICY` or `label=POLICY` (`policies.sources`).
        seed: of random methods and allocators.

    Raises:
        UsageError: an unknown method or allocator, `kvp` without policies, a method that cannot
            size the cache itself with an allocator that lets it, or two of a user's own of one
            name.
        PolicyError: a damaged policy.
    """
    built: list[Method] = []
    objects: dict[tuple[str, str, str | None], Scorer] = {}
    named: dict[tuple[bool, str], Specification] = {}
    for method in with_objects(methods):
        if isinstance(method, str) and (paths := tuned_files([method])):
            for entry in load_settings(Path(paths[0])).methods:
                _refuse_unnamed(entry.chosen, method, [*methods, *allocators])
                built += tuned_method(entry, policies, seed)
            continue
        spec: str | Scorer
        rule: str | Allocator | None
        spec, rule = split_method(method) if isinstance(method, str) else method
        if spec == FULL:
            if rule is not None:
                raise UsageError(f"--methods {method}: the full cache has no allocator")
            built.append(Method(name=FULL))
            continue
        if not isinstance(spec, str):
            earlier = objects.setdefault(method_of(spec).ranking, spec)
            if earlier is not spec and earlier != spec:
                raise UsageError(f"methods: two scorers are called {spec.name!r}: name one anew")
        rules = allocators if rule is None else (rule,)
        for scorer in NULLS if spec == ALL_NULLS else (spec,):
            for ranking in _rankings(scorer, policies, seed):
                combined = [with_allocator(ranking, allocator) for allocator in rules]
                made = (ranking.scorer, *(method.rule for method in combined))
                _refuse_namesakes(zip((scorer, *rules), made, strict=True), named)
                built += combined
    return tuple(dict.fromkeys(built))


def _refuse_namesakes(
    sides: Iterable[tuple[str | Scorer | Allocator, Scorer | Allocator | None]],
    named: dict[tuple[bool, str], Specification],
) -> None:
    """Remember in `named` what the names of a user's own scorers and allocators stand for.

    `sides` are as given and as made. Raises UsageError where a name stands for another one already,
    as results would hold one of both.
    """
    for given, made in sides:
        if not isinstance(given, str) or made is None or isinstance(made, Options | LearnedScorer):
            continue
        written = parse(given, "method")
        if named.setdefault((isinstance(made, Allocator), made.name), written) != written:
            raise UsageError(
                f"--methods: {given} and another are both called {made.name!r}: give each a name; "
                "bases that put options into it are policies.registry.Heuristic and BaseAllocator"
            )


def with_objects(methods: Iterable[Given]) -> list[str | tuple[Scorer, Allocator | None]]:
    """Names as they are, and the scorer and allocator of everything else, made where it is a class.

    Raises UsageError as `make_method`.
    """
    entries: list[str | tuple[Scorer, Allocator | None]] = []
    made: dict[object, Scorer] = {}  # a class is made once
    for method in methods:
        if isinstance(method, str):
            entries.append(method)
            continue
        pair = method if isinstance(method, tuple) else (method, None)
        if len(pair) != 2:
            raise UsageError(f"methods: {method!r:.80} is no pair of a scorer and an allocator")
        given, rule = pair
        scorer = make_scorer(given) if not isinstance(given, type) else made.get(given)
        if scorer is None:
            scorer = made[given] = make_scorer(given)
        entries.append((scorer, None if rule is None else make_allocator(rule)))
    return entries


def _rankings(scorer: str | Scorer, policies: Sequence[str], seed: int) -> list[Method]:
    """Methods of a scorer, without allocator: several for `kvp`, one for others."""
    if not isinstance(scorer, str):
        return [method_of(scorer)]
    if scorer == LEARNED:
        return learned_methods(policies)
    known_names.check_methods([scorer], "methods")
    try:
        return [registered_method(scorer, seed)]
    except UsageError as error:
        raise UsageError(f"--methods: {error}") from None


def _refuse_unnamed(chosen: Scored, file: str, given: Iterable[Given]) -> None:
    """Raise UsageError where a settings file names what is not kvp's own and no caller named."""
    texts = [method for method in given if isinstance(method, str) and not tuned_files([method])]
    named = {side.partition("(")[0] for text in texts for side in split_method(text) if side}
    for text, own in ((chosen.scorer, {*METHODS, LEARNED}), (chosen.allocator, ALLOCATORS)):
        if parse(text, "method").name not in own and (name := text.partition("(")[0]) not in named:
            raise UsageError(
                f"--methods {file} names {name}, which is not kvp's own: nothing is imported "
                f"because a file says so; if you trust it, name it: --methods {name},{file}"
            )


def tuned_method(entry: Tuned, policies: Sequence[str], seed: int) -> list[Method]:
    """The setting that kvp tune chose, one method per policy of its group.

    Raises UsageError where `--policies` has none of them, and as `build_methods`.
    """
    chosen = entry.chosen
    methods = _rankings(chosen.scorer, policies, seed)
    if entry.group:
        methods = [
            method for method in methods
            if method.policy and without_seed(method.policy, method.policy_seed) == entry.group
        ]  # fmt: skip
    if not methods:
        raise UsageError(f"--methods {TUNED}: --policies has none called {entry.group}; name it")
    return [
        replace(
            with_allocator(method, chosen.allocator),
            protocol=entry.protocol,
            protected=chosen.protected,
        )
        for method in methods
    ]


def spec_of(method: str | tuple[Scorer, Allocator | None]) -> str:
    """Name under which a method, as of `with_objects`, is recorded."""
    if isinstance(method, str):
        return method
    scorer, rule = method
    return scorer.name if rule is None else f"{scorer.name}+{rule.name}"


def with_allocator(method: Method, spec: str | Allocator) -> Method:
    """The method with an allocator; UsageError where the two do not go together."""
    assert method.scorer is not None, "the full cache has no allocator"
    try:
        _, rule = make_method(method.scorer, spec)
    except UsageError as error:
        raise UsageError(f"--methods, --allocators: {error}") from None
    used = None if rule.name == UNIFORM else rule
    return replace(method, allocator=rule.name, self_sized=sizes_itself(rule), rule=used)


def registered_method(spec: str, seed: int) -> Method:
    """A registered method; random ones draw from the run's seed unless the spec names one."""
    scorer = make_scorer(spec)
    if isinstance(scorer, Random) and "seed" not in parse(spec, "method").options:
        return replace(method_of(scorer), scorer=make_scorer(spec, seed=seed))
    return method_of(scorer)


def method_of(scorer: Scorer) -> Method:
    """A scorer by its registered name: `name`, `name:preset` or `name(option=value)`."""
    if isinstance(scorer, LearnedScorer):
        seed = scorer.metadata["training"].get("seed")
        label = Path(scorer.label).name
        return Method(name=LEARNED, policy=label, policy_seed=seed, scorer=scorer)
    name = re.split(r"[:(]", scorer.name)[0]
    variant = scorer.name.removeprefix(name).strip(":()") or "auto"
    return Method(name=name, variant=variant, scorer=scorer)


def learned_methods(arguments: Sequence[str]) -> list[Method]:
    """One `kvp` method per policy of `--policies`, with distinct labels."""
    if not arguments:
        raise UsageError(known_names.NEEDS_POLICIES)
    return [
        replace(method_of(load_policy(source)), policy=label, policy_commit=source.commit)
        for label, source in policy_sources(arguments).items()
    ]


def check_geometries(methods: Sequence[Method], geometry: Geometry) -> None:
    """Raise PolicyError where a policy or budget file is of another geometry than the model's."""
    for method in methods:
        check_geometry(method.scorer, geometry)
        if isinstance(method.rule, Evolved):
            method.rule.check(layers=geometry.layers, kv_heads=geometry.kv_heads)


def file_digests(policies: Sequence[str], methods: Sequence[Method]) -> dict[str, str]:
    """Digests of the files methods come from: policies by label, others by allocator or method.

    `policy.json` holds the checksums of all other files of a policy.
    """
    sources = policy_sources(policies) | {
        label: scorer.source for label, scorer in policies_of(methods).items() if scorer.source
    }
    digests = {label: sha256_file(source.folder / INDEX) for label, source in sources.items()}
    for method in methods:
        if isinstance(method.rule, Evolved):
            digests[method.allocator] = sha256_file(budget_path(method.rule.file))
        if isinstance(method.scorer, KVzap):
            digests[method.scorer.name] = method.scorer.digest
    return digests


def hub_records(methods: Iterable[Method]) -> dict[str, dict[str, str]]:
    """`repository` and `commit` of what comes from the hub: policies by label, others by method."""
    methods = list(methods)
    sources = {label: scorer.source for label, scorer in policies_of(methods).items()}
    records = {label: dict(source.record) for label, source in sources.items() if source}
    gates = [method.scorer for method in methods if isinstance(method.scorer, KVzap)]
    records |= {gate.name: dict(gate.record) for gate in gates}
    return {name: record for name, record in records.items() if record}


def trained_tasks(methods: Iterable[Method], files: Mapping[str, str]) -> dict[str, list[str]]:
    """Tasks that policies were trained on, by label, where their records say so.

    `files` are digests of files whose training rows are measured, by task.
    """
    by_label = {}
    for label, scorer in policies_of(methods).items():
        data = scorer.metadata.get("training", {}).get("text", {}).get("data") or {}
        digests = data.get("files", [data.get("digest")])
        rows = [task for task, digest in files.items() if digest in digests]
        by_label[label] = [*data.get("tasks", ()), *rows]
    return {label: tasks for label, tasks in by_label.items() if tasks}


def policies_of(methods: Iterable[Method]) -> dict[str, LearnedScorer]:
    """The policies that methods rank with, by label."""
    return {
        method.policy: method.scorer
        for method in methods if method.policy and isinstance(method.scorer, LearnedScorer)
    }  # fmt: skip


def policy_sources(arguments: Sequence[str]) -> dict[str, PolicySource]:
    """Policies by label, folders of policy directories expanded.

    Each argument is `POLICY` or `label=POLICY`, with policies named as for `find_policy`. Raises
    UsageError where two share a label, PolicyError where there is no policy and as `find_policy`.
    """
    sources: dict[str, PolicySource] = {}
    for argument in arguments:
        label, name = known_names.labelled_policy(argument)
        try:
            source = find_policy(name)
        except PolicyError as error:
            raise PolicyError(f"--policies: {error}") from error
        root = source.folder
        policies = {label or source.label: source}
        if not (root / INDEX).exists():
            inner = sorted(path.parent for path in root.glob(f"*/{INDEX}"))
            prefix = f"{label}." if label else ""
            policies = {f"{prefix}{folder.name}": find_policy(folder) for folder in inner}
        if not policies:
            raise PolicyError(f"--policies: {root} holds no policy.json; is this a policy folder?")
        for key, policy in policies.items():
            if key in sources:
                raise UsageError(f"--policies: two policies are called {key!r}; use label=POLICY")
            sources[key] = policy
    return sources


PROTECTIONS = {"both": (True, False), "on": (True,), "off": (False,)}
"""Values of `--protection`: whether first and last tokens are always kept."""


@dataclass(frozen=True, kw_only=True)
class Setting:
    """A method with or without protection, at one budget."""

    method: Method
    budget: Budget | None
    """None for the full cache, and where the method sizes the cache itself."""
    protected: bool = False
    """Whether first and last tokens are always kept."""
    protection: Protection = UNPROTECTED
    """The tokens that are always kept."""

    @property
    def spec(self) -> str | None:
        """`budget_spec` of its records."""
        if self.budget is not None:
            return str(self.budget)
        return SELF_SIZED if self.method.self_sized else None

    @property
    def fields(self) -> dict[str, Any]:
        """What names it in every results file; the budget is `spec`."""
        of = self.method
        commit = {"policy_commit": of.policy_commit} if of.policy_commit else {}
        return {
            "method": of.name, "variant": of.variant, "allocator": of.allocator,
            "policy": of.policy, "policy_seed": of.policy_seed, **commit,
            "protected": self.protected,
        }  # fmt: skip

    @property
    def key(self) -> Key:
        """`SETTING_FIELDS` of its records."""
        return key_of({**self.fields, "budget_spec": self.spec}, SETTING_FIELDS)

    def tokens(self, cached: int) -> int:
        """Tokens per KV head that it may keep of `cached` ones, all of them without a budget."""
        return cached if self.budget is None else kept_tokens(self.budget, cached, self.protection)

    def shrinks(self, cached: int) -> bool:
        """Whether it may evict some of `cached` tokens."""
        return self.method.self_sized or self.tokens(cached) < cached
