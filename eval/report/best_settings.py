"""One comparison of methods, and the setting in which each of them is shown.

One setting serves the whole curve: the one with the best mean over the budgets that all settings of
the method have. It is chosen on a validation folder where one is given, else on the prompts shown,
which favours methods with many settings over those with few; the page says which.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from eval.report.aggregates import (
    Budgets,
    Estimate,
    Grid,
    ReportedMethod,
    attention_grid,
    budget_axis,
    complete,
    perplexity_grid,
    score_grid,
)
from eval.report.load import Results
from eval.report.schema import PROTOCOL_NAMES
from eval.results.records import FULL, LEARNED, ORACLE, UNIFORM, Row, policy_groups
from eval.stats import Interval, Unit, paired_difference

CLOSE = 0.02
"""Distance to the full cache, as a share of 1, that counts as reaching it."""

Kind = Literal["accuracy", "perplexity", "kept"]
"""Scores of answers, likelihood of given replies, future attention kept on traces."""


@dataclass(frozen=True, kw_only=True)
class Choice:
    """The setting in which a method is shown."""

    setting: ReportedMethod
    settings: int
    """How many there were to choose from."""
    validated: bool
    """Whether the prompts of another folder decided."""

    @property
    def name(self) -> str:
        """The method."""
        return self.setting.family if self.setting.details else "full cache"

    @property
    def note(self) -> str:
        """The setting, and how it was chosen."""
        if self.settings == 1:
            return self.setting.details
        selected = "chosen on validation" if self.validated else f"best of {self.settings}"
        return f"{self.setting.details}, {selected}"

    @property
    def legend(self) -> str:
        """Name in legends: method, preset and allocator; tables state the protection."""
        setting = self.setting
        if setting.method == FULL:
            return self.name
        preset = "" if setting.variant == "auto" else f":{setting.variant}"
        plain = setting.allocator == UNIFORM or setting.self_sized
        return f"{self.name}{preset}{'' if plain else f'+{setting.allocator}'}"


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Numbers of one kind under one protocol."""

    kind: Kind
    protocol: str
    budgets: Budgets
    grid: Grid
    """All tasks together; only estimates that are over all of them."""
    tasks: Mapping[str, Grid]
    """Task by task; empty for traces."""
    choices: Mapping[str, Choice]
    """Setting shown for each method, by family, in the order to show them."""
    conditions: str
    """n, split, seeds, protection and protocol, for captions."""

    @property
    def higher_is_better(self) -> bool:
        """Whether a larger number is the better one."""
        return self.kind != "perplexity"

    def estimate(self, family: str, spec: str | None) -> Estimate | None:
        """Estimate of a method in the setting shown; None where it has none."""
        if family not in self.choices:
            return None
        return self.grid.get(self.choices[family].setting, {}).get(spec)

    @property
    def interval(self) -> str:
        """What the intervals are over, for captions."""
        units = "sequences" if self.kind == "kept" else "prompts"
        seeds = {
            estimate.policies
            for setting, estimates in self.grid.items() if setting.method == LEARNED
            for estimate in estimates.values()
        }  # fmt: skip
        policies = " and policy seeds" if max(seeds, default=0) > 1 else ""
        alone = "; of one policy seed: what another would change is not in it" if 1 in seeds else ""
        return f"95 % bootstrap interval over {units}{policies}{alone}"

    @property
    def full(self) -> Estimate | None:
        """Estimate of the full cache."""
        return self.estimate(FULL, None)


def compare(
    results: Results, kind: Kind, protocol: str, *, validation: Results | None, resamples: int
) -> Comparison | None:
    """Compare all methods of a results folder; None where it has no such records."""
    rows = select(results, kind, protocol)
    if not any(row["budget_spec"] for row in rows):
        return None
    groups = policy_groups([*results.rows, *results.kept])
    all_methods = _grid(kind, rows, groups, resamples)
    grid = complete(all_methods)
    tasks: dict[str, Grid] = {
        name: _grid(kind, [row for row in rows if row["task"] == name], groups, resamples)
        for name in dict.fromkeys(row["task"] for row in rows if "task" in row)
    }
    deciding = None
    if validation is not None:
        others = policy_groups([*validation.rows, *validation.kept])
        deciding = _grid(kind, select(validation, kind, protocol), others, 1) or None
    better = kind != "perplexity"
    choices = {
        **choose(all_methods, higher_is_better=better, validation=deciding),
        **choose(grid, higher_is_better=better, validation=deciding),
    }
    partial = [family for family, choice in choices.items() if choice.setting not in grid]
    return Comparison(
        kind=kind,
        protocol=protocol,
        budgets=budget_axis(rows),
        grid=grid,
        tasks=tasks,
        choices={family: choices[family] for family in in_order(list(choices))},
        conditions=_conditions(results, kind, rows, grid, choices, protocol) + _left_out(partial),
    )


def select(results: Results, kind: Kind, protocol: str) -> list[Row]:
    """Records of one kind and protocol."""
    if kind == "kept":
        return [row for row in results.kept if row["protocol"] == protocol]
    field = "score" if kind == "accuracy" else "nll"
    return [row for row in results.rows if row["protocol"] == protocol and row[field] is not None]


def _grid(
    kind: Kind, rows: Sequence[Row], groups: Mapping[str | None, str], resamples: int
) -> Grid:
    if kind == "kept":
        return attention_grid(rows, groups)
    measure = score_grid if kind == "accuracy" else perplexity_grid
    return measure(rows, groups, resamples=resamples)


def choose(
    grid: Grid, *, higher_is_better: bool, validation: Grid | None = None
) -> dict[str, Choice]:
    """The setting to show for every method of a grid, by family, in the order of the grid."""
    families: dict[str, list[ReportedMethod]] = {}
    for setting in grid:
        families.setdefault(setting.family, []).append(setting)
    sign = 1.0 if higher_is_better else -1.0
    choices = {}
    for family, settings in families.items():
        deciding = grid
        if validation is not None and all(setting in validation for setting in settings):
            deciding = validation
        means = _means(deciding, settings)
        best = max(settings, key=lambda setting: (sign * means[setting], setting.protected))
        choices[family] = Choice(
            setting=best, settings=len(settings), validated=deciding is not grid
        )
    return choices


def shown_first(
    grid: Grid, choices: Mapping[str, Choice], maximum: int, *, higher_is_better: bool
) -> list[str]:
    """Families that a figure of at most `maximum` lines shows at first.

    References, learned policies and self-sized methods first, then the best by their mean over the
    budgets that all the others have.
    """
    settings = {
        family: choice.setting for family, choice in choices.items() if choice.setting in grid
    }
    always = [
        family for family, setting in settings.items()
        if setting.self_sized or setting.method in (FULL, ORACLE, LEARNED)
    ]  # fmt: skip
    others = {family: setting for family, setting in settings.items() if family not in always}
    if not others:
        return always
    sign = 1.0 if higher_is_better else -1.0
    means = _means(grid, list(others.values()))
    best = sorted(others, key=lambda family: -sign * means[others[family]])
    return [*always, *best[: max(0, maximum - len(always))]]


def _means(grid: Grid, settings: Collection[ReportedMethod]) -> Mapping[ReportedMethod, float]:
    """Mean over the budgets that all settings have (over all of each where they share none)."""
    shared = set.intersection(*(set(grid[setting]) for setting in settings))
    return {
        setting: float(
            np.mean([grid[setting][spec].interval.mean for spec in shared or set(grid[setting])])
        )
        for setting in settings
    }


@dataclass(frozen=True, kw_only=True)
class BaselineDifference:
    """A policy minus the best attention-free baseline at one budget."""

    family: str
    """Policy group."""
    baseline: str
    """Family of the baseline."""
    difference: Interval
    """Over the prompts both answered."""
    both_reach_full: bool
    """Whether both means are within `CLOSE` of the full cache's (or above it)."""


def best_methods(
    grid: Grid,
    choices: Mapping[str, Choice],
    spec: str,
    among: Collection[str] | None = None,
    *,
    higher_is_better: bool = True,
) -> list[str]:
    """Families with the best mean at a budget, learned policies included; several where they tie.

    The full cache and the oracle are references and never the best. With `among`, names of
    methods, only baselines of these names count, and no learned policy.
    """
    means = {}
    for family, choice in choices.items():
        estimate = grid.get(choice.setting, {}).get(spec)
        method = choice.setting.method
        if estimate is None or method in (FULL, ORACLE):
            continue
        if among is None or (method in among and method != LEARNED):
            means[family] = estimate.interval.mean
    if not means:
        return []
    best = max(means.values()) if higher_is_better else min(means.values())
    return [family for family, mean in means.items() if mean == best]


def differences_to_baseline(
    comparison: Comparison, spec: str, attention_free: Collection[str], *, resamples: int
) -> list[BaselineDifference]:
    """Every policy group minus the best attention-free baseline shown at a budget."""
    best = best_methods(comparison.grid, comparison.choices, spec, attention_free)
    if not best:
        return []
    baseline = comparison.estimate(best[0], spec)
    assert baseline is not None
    full = comparison.full
    differences = []
    for family, choice in comparison.choices.items():
        policy = comparison.estimate(family, spec)
        if choice.setting.method != LEARNED or policy is None:
            continue
        if not _prompts(policy) & _prompts(baseline):
            continue
        lower = min(policy.interval.mean, baseline.interval.mean)
        differences.append(
            BaselineDifference(
                family=family,
                baseline=best[0],
                difference=paired_difference(policy.scores, baseline.scores, resamples=resamples),
                both_reach_full=full is not None and lower >= full.interval.mean - CLOSE,
            )
        )
    return differences


def _prompts(estimate: Estimate) -> set[Unit]:
    return {unit for answers in estimate.scores.values() for unit in answers}


def in_order(families: Sequence[str]) -> list[str]:
    """Full cache, oracle, learned policies, then the others as they came."""
    first = (FULL, ORACLE, LEARNED)

    def index(family: str) -> int:
        method = family.partition("/")[0]
        return first.index(method) if method in first else len(first)

    return sorted(families, key=index)


def _conditions(
    results: Results,
    kind: Kind,
    rows: Sequence[Row],
    grid: Grid,
    choices: Mapping[str, Choice],
    protocol: str,
) -> str:
    where = f"{PROTOCOL_NAMES[protocol]}; {_protection(results, choices)}"
    if kind == "kept":
        sequences = "/".join(str(n) for n in sorted({row["sequences"] for row in rows}))
        return (
            f"n = {sequences} held-out sequences, seed {results.setting('seed')}"
            f"{policy_words(rows, 'averaged')}; {where}"
        )
    prompts = {(row["task"], row["example"]) for row in rows}
    sizes = [sum(unit[0] == task for unit in prompts) for task in {task for task, _ in prompts}]
    per_task = f"{min(sizes)}" if min(sizes) == max(sizes) else f"{min(sizes)} to {max(sizes)}"
    answered = {found.interval.prompts for budgets in grid.values() for found in budgets.values()}
    fewer = "" if len(answered) < 2 else f", unfinished settings with {min(answered)} or more"
    spread = f" ({per_task} per task{fewer})" if len(sizes) > 1 else fewer
    return (
        f"n = {len(prompts)} prompts{spread}, "
        f"split {results.setting('split')}, prompt seed {results.setting('seed')}"
        f"{policy_words(rows, 'averaged per prompt')}; {where}"
    )


def _left_out(partial: Sequence[str]) -> str:
    """Methods that a comparison over all tasks lacks, as part of a caption."""
    if not partial:
        return ""
    return f"; without {', '.join(partial)}, which have answers to some of the tasks only"


def policy_words(rows: Sequence[Row], averaged: str) -> str:
    """The policies that occur in records, as part of a caption; empty where there are none."""
    labels = list(dict.fromkeys(row["policy"] for row in rows if row["policy"] is not None))
    if len(labels) < 2:
        return f"; policy {labels[0]}" if labels else ""
    return f"; policies {', '.join(labels)}, {averaged}"


def _protection(results: Results, choices: Mapping[str, Choice]) -> str:
    kept = (
        f"protected = first {results.setting('sinks')} and last {results.setting('recents')} "
        "tokens always kept"
    )
    several = [choice for choice in choices.values() if choice.settings > 1]
    if not several:
        return kept
    if all(choice.validated for choice in several):
        return f"{kept}, the setting of each method chosen on validation prompts"
    shown_here = "the setting of each method (preset, allocator, protection) chosen on the prompts "
    some = [choice.name for choice in several if choice.validated]
    if not some:
        return f"{kept}, {shown_here}shown, the best mean over the whole curve"
    there = [choice.name for choice in several if not choice.validated]
    return (
        f"{kept}, the setting of each method chosen on validation prompts, "
        f"of {', '.join(there)} on the prompts shown"
    )
