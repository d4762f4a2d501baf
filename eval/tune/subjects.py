"""The methods of a tuning: what is searched for each, and how a candidate is written and run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from eval.methods import ALL_NULLS, Method, allocated, learned_methods, method_of, registered_method
from eval.results.records import FULL, LEARNED, policy_groups
from eval.settings import PROTECTIONS
from eval.tune.config import TuneConfig
from eval.tune.search import Candidate, Space, rule_name
from eval.tune.settings_file import TUNED
from kvp.errors import UsageError
from kvp.ranking import Allocator
from kvp.scoring import Scorer
from policies import make_allocator, make_scorer, sizes_itself, split_method
from policies.registry import NULLS, Grid, Options, parse


@dataclass(frozen=True, kw_only=True)
class Subject:
    """One method to tune, policy seeds together."""

    requested: str
    """The method as `--methods` names it."""
    group: str
    """Policies that differ only in seed, where there are several groups."""
    runs: tuple[Method, ...]
    """The method with its defaults; one per policy seed."""
    start: tuple[Scorer | None, ...]
    """Scorers of the default and the presets; None alone for policies."""
    options: Grid
    """Grids of the options that are not fixed."""
    allocators: tuple[Allocator, ...]
    fixed_allocator: bool
    """Whether the method names its allocator."""

    @property
    def label(self) -> str:
        """The method as it is requested, with its policy group."""
        return f"{self.requested}/{self.group}" if self.group else self.requested

    def space(self, protection: str, tokens: int) -> Space:
        """What is searched, for prompts of at most `tokens` cached tokens."""
        return Space(
            start=tuple(
                Candidate(scorer=scorer, allocator=self.allocators[0], protected=protected)
                for scorer in self.start
                for protected in PROTECTIONS[protection]
            ),
            options=self.options,
            allocators=self.allocators,
            allocator_options=not self.fixed_allocator,
            tokens=tokens,
        )

    def every_rule(self) -> list[Method]:
        """The defaults with every allocator, to check and to digest the files they come from."""
        return [allocated(method, rule.name) for method in self.runs for rule in self.allocators]

    def methods(self, candidate: Candidate) -> list[Method]:
        """The candidate as kvp-eval runs it, one method per policy seed."""
        methods: Sequence[Method] = self.runs
        if candidate.scorer is not None and candidate.scorer != self.start[0]:
            methods = [method_of(candidate.scorer)]
        return [allocated(method, candidate.allocator.name) for method in methods]

    def spec(self, candidate: Candidate) -> str:
        """Specification of the candidate's scorer, for `--methods`."""
        if candidate.scorer is None:
            return LEARNED
        front = split_method(self.requested)[0]
        if candidate.scorer == self.start[0]:
            return front
        written = parse(front, "method")
        method = self.runs[0].name
        if written.name == method:
            return candidate.scorer.name
        options = candidate.scorer.name.removeprefix(method)  # of package.module:Name
        return f"{written.name}:{written.argument}{options}"


def subjects_of(config: TuneConfig) -> list[Subject]:
    """Methods of `--methods`; raises UsageError on what cannot be tuned, and as `build_methods`."""
    shared = tuple(make_allocator(spec) for spec in config.evaluation.allocator_list)
    names = [rule_name(allocator) for allocator in shared]
    if len(set(names)) < len(names) or any(sizes_itself(allocator) for allocator in shared):
        raise UsageError(
            f"--allocators {config.allocators}: name each allocator once, and none that ignores "
            "the budget"
        )
    found: list[Subject] = []
    for text in config.evaluation.method_list:
        spec, rule = split_method(text)
        if spec == FULL or spec.startswith(f"{TUNED}:"):
            raise UsageError(f"--methods {text}: nothing is chosen for it; leave it out")
        allocators = shared if rule is None else (make_allocator(rule),)
        if sizes_itself(allocators[0]):
            raise UsageError(f"--methods {text}: it ignores the budget, so leave it out")
        common: dict[str, Any] = {
            "requested": text,
            "allocators": allocators,
            "fixed_allocator": rule is not None,
        }
        if spec == LEARNED:
            found += _learned(config, common)
            continue
        for name in NULLS if spec == ALL_NULLS else (spec,):
            requested = name if rule is None else f"{name}+{rule}"
            found.append(_registered(name, config.seed, {**common, "requested": requested}))
    return found


def _learned(config: TuneConfig, common: Mapping[str, Any]) -> list[Subject]:
    """One subject per group of policies that differ only in seed."""
    policies = learned_methods(config.evaluation.policy_list)
    groups = group_of(policies)
    return [
        Subject(
            group=group,
            runs=tuple(method for method in policies if groups[method.policy] == group),
            start=(None,),
            options={},
            **common,
        )
        for group in dict.fromkeys(groups[method.policy] for method in policies)
    ]


def group_of(policies: Sequence[Method]) -> dict[str | None, str]:
    """Group of every policy label, as reports name it."""
    return policy_groups(
        {"policy": method.policy, "policy_seed": method.policy_seed} for method in policies
    )


def _registered(spec: str, seed: int, common: Mapping[str, Any]) -> Subject:
    method = registered_method(spec, seed)
    scorer = method.scorer
    assert scorer is not None, "a registered method has a scorer"
    written = parse(spec, "method")
    presets: list[Scorer] = []
    fixed = set(written.options)
    if isinstance(scorer, Options):
        plain = not written.options and written.argument is None
        if plain:
            presets = [make_scorer(f"{spec}:{preset}") for preset in scorer.presets]
        fixed |= set(scorer.presets.get(written.argument or "", {}))
    return Subject(
        group="",
        runs=(method,),
        start=tuple(dict.fromkeys([scorer, *presets])),
        options={
            name: grid for name, grid in getattr(scorer, "grid", {}).items() if name not in fixed
        },
        **common,
    )
