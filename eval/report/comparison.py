"""Compare methods, each in one setting (preset or options, allocator, protection).

Which setting that is, `eval.report.choose_settings` says; the sentences are those at the end of
kvp-eval (`eval.conclusion`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from eval.conclusion import Best, best_lines, curve_sentences, difference_sentences, main_sentence
from eval.records import FULL, LEARNED, ORACLE, PROTOCOL_NAMES, Record, policy_groups
from eval.report.aggregates import (
    FIELDS,
    Budgets,
    Estimate,
    Grid,
    Kind,
    ReportedMethod,
    budget_axis,
    complete,
    estimates,
)
from eval.report.choose_settings import Choice, choose
from eval.results import Results
from eval.stats import Bounds
from eval.summary import FULL_COLUMN, Line
from policies.registry import NULLS


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """All methods by one metric under one protocol."""

    kind: Kind
    protocol: str
    budgets: Budgets
    grid: Grid
    """Over all tasks; settings without answers to some of them are left out."""
    tasks: Mapping[str, Grid]
    """By task."""
    choices: Mapping[str, Choice]
    """The chosen setting of each method, by family, in display order."""
    conditions: str
    """n, split, seeds, protection and protocol, for captions."""
    resamples: int
    """Resamples behind each interval."""

    @property
    def higher_is_better(self) -> bool:
        """False for perplexity."""
        return self.kind != "perplexity"

    @property
    def bounds(self) -> Bounds | None:
        """Least and largest difference of two prompts' values (`eval.stats`)."""
        return (-1, 1) if self.kind == "accuracy" else None

    def estimate(self, family: str, spec: str | None) -> Estimate | None:
        """Estimate of a method in its chosen setting; None where there is none."""
        if family not in self.choices:
            return None
        return self.grid.get(self.choices[family].setting, {}).get(spec)

    @property
    def interval(self) -> str:
        """What the intervals are over, for captions."""
        seeds = {
            estimate.policies
            for setting, estimates in self.grid.items() if setting.method == LEARNED
            for estimate in estimates.values()
        }  # fmt: skip
        policies = " and policy seeds" if max(seeds, default=0) > 1 else ""
        alone = "; of one policy seed: what another would change is not in it" if 1 in seeds else ""
        return f"95 % bootstrap interval over prompts{policies}{alone}"


def compare(results: Results, kind: Kind, protocol: str, *, resamples: int) -> Comparison | None:
    """Compare all methods of a results folder; None without records of this kind with a budget."""
    records = select(results, kind, protocol)
    if not any(record["budget_spec"] for record in records):
        return None
    groups = policy_groups(results.records)

    all_methods = estimates(kind, records, groups, resamples=resamples)
    grid = complete(all_methods)
    tuned = [
        (entry, settings.split) for settings in results.tuned for entry in settings.methods
        if entry.protocol == protocol
    ]  # fmt: skip
    # A setting without answers to all tasks is shown only where its method has no other.
    choices = {**choose(all_methods, tuned), **choose(grid, tuned)}
    partial = [family for family, choice in choices.items() if choice.setting not in grid]
    left_out = f"; without {', '.join(partial)}, which answered only some of the tasks"
    return Comparison(
        kind=kind,
        protocol=protocol,
        budgets=budget_axis(records),
        grid=grid,
        tasks={
            name: estimates(
                kind,
                [record for record in records if record["task"] == name],
                groups,
                resamples=resamples,
            )
            for name in dict.fromkeys(record["task"] for record in records)
        },
        choices={family: choices[family] for family in in_order(list(choices))},
        conditions=_conditions(results, records, protocol) + (left_out if partial else ""),
        resamples=resamples,
    )


def select(results: Results, kind: Kind, protocol: str) -> list[Record]:
    """Records of one kind and protocol."""
    return [
        each
        for each in results.records
        if each["protocol"] == protocol and each[FIELDS[kind]] is not None
    ]


def best_of(comparison: Comparison) -> Best | None:
    """The methods that sentences name; None where no method was run.

    The policy, the best method without training and the best null in any of its settings, at the
    budget of kvp-eval's closing sentence. "Best" is by the prompts shown, which favours them.
    """
    lines = [
        Line(
            protocol=comparison.protocol,
            setting=setting,
            label=setting.family if setting.details else "full cache",
            cells={
                FULL_COLUMN if setting.method == FULL else spec or FULL_COLUMN: estimate.interval
                for spec, estimate in estimates.items()
            },
            scores={spec: estimate.scores for spec, estimate in estimates.items() if spec},
            policies=max(estimate.policies for estimate in estimates.values()),
            over_null={},
        )
        for setting, estimates in comparison.grid.items()
        if setting.method in NULLS or comparison.choices[setting.family].setting == setting
    ]
    return best_lines(lines, losses=not comparison.higher_is_better) if lines else None


def summary(comparison: Comparison) -> tuple[Best, list[str]] | None:
    """`best_of`, and the sentences about them."""
    best, losses = best_of(comparison), not comparison.higher_is_better
    if best is None:
        return None
    sentences = [main_sentence(best, losses=losses)]
    if comparison.kind == "accuracy":
        sentences += curve_sentences(best)
        sentences += difference_sentences(best, resamples=comparison.resamples, seed=0)
    return best, sentences


def drawn_settings(comparison: Comparison, maximum: int = 12) -> dict[ReportedMethod, bool]:
    """At most `maximum` settings for a figure, and whether it draws them in front.

    In front: the full cache, the oracle, and `best_of`. Behind: the others of the best
    means over the budgets that all of them have.
    """
    best = best_of(comparison)
    settings = [choice.setting for choice in comparison.choices.values()
                if choice.setting in comparison.grid]  # fmt: skip
    front = [setting for setting in settings if setting.method in (FULL, ORACLE, LEARNED)]
    front += [line.setting for line in best.lines] if best else settings
    others = [setting for setting in settings if setting not in front]
    if others:
        shared = set.intersection(*(set(comparison.grid[setting]) for setting in others))

        def mean(setting: ReportedMethod) -> float:
            estimates = comparison.grid[setting]
            values = [estimates[spec].interval.mean for spec in shared or estimates]
            return float(np.mean(values))

        others.sort(key=mean, reverse=comparison.higher_is_better)
    front = list(dict.fromkeys(front))
    behind = others[: max(0, maximum - len(front))]
    return {**dict.fromkeys(front, True), **dict.fromkeys(behind, False)}


def in_order(families: Sequence[str]) -> list[str]:
    """Full cache, oracle, learned policies, then the others in the given order."""
    first = (FULL, ORACLE, LEARNED)

    def index(family: str) -> int:
        method = family.partition("/")[0]
        return first.index(method) if method in first else len(first)

    return sorted(families, key=index)


def _conditions(results: Results, records: Sequence[Record], protocol: str) -> str:
    prompts = {(record["task"], record["example"]) for record in records}
    sizes = sorted(Counter(task for task, _ in prompts).values())
    per_task = f"{sizes[0]}" if sizes[0] == sizes[-1] else f"{sizes[0]} to {sizes[-1]}"
    policies = dict.fromkeys(record["policy"] for record in records if record["policy"])
    named = f"; policies {', '.join(policies)}" if policies else ""
    return (
        f"n = {len(prompts)} prompts ({per_task} per task), split {results.setting('split')}, "
        f"prompt seed {results.setting('seed')}"
        f"{named}; {PROTOCOL_NAMES[protocol]}; "
        f"protected = first {results.setting('sinks')} and last {results.setting('recents')} "
        "tokens always kept"
    )
