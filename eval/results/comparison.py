"""What methods score under one protocol: every number, and the settings shown.

The closing table of kvp eval, reports and model cards show these numbers. A method is reported as
it was run: preset, allocator, protection, and for `kvp` the group of policies that differ only in
their training seed. Where one setting of a method is shown, it is the same at every budget, and the
prompts shown never choose it: it is the one that kvp tune chose on others, else the method's
default among those that were run. Intervals are over prompts and policy seeds (`stats`).

Tasks on which the full cache fails, or nothing is lost without context, are set apart
(`sort_tasks`), and what is unfinished ranks no method. What is said of the numbers is in
`eval.results.sentences`.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from decimal import Decimal
from functools import cached_property
from operator import itemgetter
from typing import Literal, TypeVar

import numpy as np

from eval.results.folder import Results, describe_measure, unfinished_work
from eval.results.records import (
    FULL,
    LEARNED,
    ORACLE,
    SEEN,
    SELF_SIZED,
    UNIFORM,
    group_by,
    method_label,
    policy_groups,
)
from eval.results.shapes import MethodFields, ResultsRow
from eval.results.stats import (
    Interval,
    Scores,
    Unit,
    bootstrap_mean,
    holm,
    paired_difference,
    perplexity,
    prompt_values,
    prompts_of,
    reply_tokens,
)
from eval.tune.tuned_settings import Tuned
from kvp.budgets import parse_budget
from policies.registry import NULLS

Key = TypeVar("Key")
Kind = Literal["accuracy", "perplexity"]
"""Scores of answers, perplexity of given replies."""
FIELDS: Mapping[Kind, Literal["score", "nll"]] = {"accuracy": "score", "perplexity": "nll"}
"""Field of a record that holds the number."""
MEASURES: Mapping[Kind, str] = {
    "accuracy": "accuracy, %", "perplexity": "perplexity of the given text",
}  # fmt: skip
"""What is measured, wherever it is shown."""
PROTECTED = " +p"
"""What a label ends with where first and last tokens are always kept."""
RECOMMENDED = ("global", "ada")
"""Allocators of a policy, the one that is shown first (docs/decisions.md has the reasons)."""
USUAL_BUDGET = "12.5%"
"""The budget of sentences where most methods have it; else the middle one that most have."""
FAILED, NEEDLESS = "the full cache fails", "nothing is lost without context on"
"""Why tasks are set apart."""
FAILS = 0.4
"""Mean score of the full cache below which a model cannot do a task (`sort_tasks`)."""
GRADED = frozenset(("f1", "rouge_l", "rouge_recall", "rouge_l_sum", "code", "share_of_numbers"))
"""Metrics whose scores are low for good answers, too: shares of words, not right or wrong."""
LEAST_GAIN = 0.05
"""Nats per token that a context has to be worth: 5 % of the perplexity."""


@dataclass(frozen=True, kw_only=True, order=True)
class ReportedMethod:
    """A method as it was run, policy seeds together."""

    method: str
    """Name in the registry, `kvp` or `full`."""
    group: str
    """Policies that differ only in seed; empty where there is one group."""
    variant: str
    """Preset; `auto` is the method's default for the budget."""
    protected: bool
    """Whether first and last tokens are always kept."""
    allocator: str = UNIFORM
    """Rule that splits the budget over the heads."""
    self_sized: bool = False
    """Whether the method sized the cache itself, whatever the budget."""

    @property
    def family(self) -> str:
        """Name of a line in a figure: the method, with its policy group.

        A method that sizes the cache itself is a separate family: it has no budgets to compare
        at.
        """
        name = f"{self.method}/{self.group}" if self.group else self.method
        return f"{name}+{self.allocator}" if self.self_sized else name

    @property
    def name(self) -> str:
        """The family in words."""
        return "full cache" if self.method == FULL else self.family

    @property
    def label(self) -> str:
        """Method, preset and allocator as `--methods` has them, `+p` where it is protected."""
        name = f"{self.method}/{self.group}" if self.group else self.method
        label = method_label(name, self.variant, self.allocator)
        return f"{label}{PROTECTED * self.protected}"

    @property
    def details(self) -> str:
        """Preset, allocator and protection in words, empty for the full cache."""
        if self.method == FULL:
            return ""
        words = [] if self.variant == "auto" else [self.variant]
        if self.allocator != UNIFORM and not self.self_sized:
            words.append(f"+{self.allocator}")
        return ", ".join([*words, self.protection])

    @property
    def protection(self) -> str:
        """Whether first and last tokens are always kept, in a word."""
        return "protected" if self.protected else "unprotected"


def method_of(record: MethodFields, groups: Mapping[str | None, str]) -> ReportedMethod:
    """Method that a record of any results file belongs to."""
    return ReportedMethod(
        method=record["method"],
        variant=record["variant"],
        group=groups[record["policy"]],
        protected=record["protected"],
        allocator=record["allocator"],
        self_sized=record["budget_spec"] == SELF_SIZED,
    )


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """One number of a table."""

    interval: Interval
    policies: int
    """Policies averaged, 0 for methods without."""
    scores: Scores
    """Score per policy and prompt, or log-likelihood per token (`eval.results.stats`)."""
    weights: Mapping[Unit, float] | None
    """Tokens of the replies by prompt; None for answers."""
    kept_tokens: float
    """Tokens kept per KV head, mean over heads and prompts."""
    share: float
    """The same as a share of the tokens cached before."""
    nbytes: float | None
    """Bytes of keys and values after the eviction, mean over prompts; None where unmeasured."""


Grid = Mapping[ReportedMethod, Mapping[str | None, Estimate]]
"""Method -> budget spec (None for the full cache) -> number."""


def estimates(
    kind: Kind, records: Sequence[ResultsRow], groups: Mapping[str | None, str], *, resamples: int
) -> Grid:
    """Numbers of one protocol by method and budget; `groups` are those of the policies.

    Scores, 0 to 1: the mean over tasks of the mean over prompts. Perplexity: exp(sum of nll / sum
    of reply tokens).
    """
    scored = [record for record in records if record[FIELDS[kind]] is not None]
    return {
        method: {
            spec: _estimate(kind, part, resamples)
            for spec, part in group_by(of_method, itemgetter("budget_spec")).items()
        }
        for method, of_method in group_by(scored, lambda record: method_of(record, groups)).items()
    }


def _estimate(kind: Kind, records: list[ResultsRow], resamples: int) -> Estimate:
    scores = prompt_values(records)
    if kind == "accuracy":
        interval = bootstrap_mean(scores, resamples=resamples)
    else:
        interval = perplexity(records, resamples=resamples)
    nbytes = [size for record in records if (size := record.get("cache_bytes")) is not None]
    shares = [record["kept_tokens"] / record["cached_tokens"] for record in records]
    return Estimate(
        interval=interval,
        policies=len({record["policy"] for record in records} - {None}),
        scores=scores,
        weights=reply_tokens(records),
        kept_tokens=float(np.mean([record["kept_tokens"] for record in records])),
        share=float(np.mean(shares)),
        nbytes=float(np.mean(nbytes)) if len(nbytes) == len(records) else None,
    )


def complete(grid: Grid) -> Grid:
    """The estimates that are over all prompts of a grid; the others cannot be compared with them.

    A folder that was extended by a task, or by prompts, has methods without answers to them.
    """
    prompts: set[Unit] = set().union(*(
        prompts_of(cell.scores) for budgets in grid.values() for cell in budgets.values()
    ))  # fmt: skip
    whole = {
        method: {spec: cell for spec, cell in budgets.items() if prompts_of(cell.scores) == prompts}
        for method, budgets in grid.items()
    }
    return {method: budgets for method, budgets in whole.items() if budgets}


@dataclass(frozen=True, kw_only=True)
class SortedTasks:
    """Which tasks can tell methods apart."""

    usable: tuple[str, ...]
    reasons: Mapping[str, tuple[str, str]]
    """Tasks that are set apart: why, and what shows it."""

    @property
    def tasks(self) -> tuple[str, ...]:
        """All of them, those that are set apart last."""
        return (*self.usable, *self.reasons)

    @property
    def apart(self) -> str:
        """What is set apart, and why, in a sentence; "" where nothing is."""
        named: dict[str, list[str]] = {}
        for task, (why, shown) in self.reasons.items():
            named.setdefault(why, []).append(f"{task} ({shown})")
        parts = [f"{why} {', '.join(named[why])}" for why in (FAILED, NEEDLESS) if why in named]
        first = "Set apart" if self.usable else "No task here can tell methods apart"
        return f"{first}: {'; '.join(parts)}." if parts else ""


def sort_tasks(kind: Kind, records: Iterable[ResultsRow], *, resamples: int = 2000) -> SortedTasks:
    """Sort the tasks of one protocol into usable ones and those that say nothing of methods.

    The full cache fails a task where its mean score is below `FAILS`: a ratio to it is then one of
    a few answers, and what methods answer is chance. The mean, not the interval, so that few
    prompts do not set apart what the model can do; not for `GRADED` metrics. Nothing is lost
    without context where the best null at the smallest budget it was run at scores within the
    interval of the full cache (and half of it, for intervals of few prompts are wide), or the full
    cache gains less than `LEAST_GAIN` nats per token: these prompts cannot show what lies between.
    All are usable where the full cache was not run.
    """
    tasks = group_by(records, itemgetter("task"))
    apart: dict[str, tuple[str, str]] = {}
    for task, of_task in tasks.items():
        controls = [record for record in of_task if record["method"] in (FULL, *NULLS)]
        least = next(iter(budget_axis(controls).specs), None)
        few = [record for record in controls if record["budget_spec"] in (None, least)]
        grid = estimates(kind, few, defaultdict(str), resamples=resamples)
        full = next((row[None] for row in grid.values() if None in row), None)
        nulls = {null.label: row[least] for null, row in grid.items() if least and least in row}
        if full is None:
            continue
        whole, graded = full.interval.mean, any(record.get("metric") in GRADED for record in few)
        if kind == "accuracy" and whole < FAILS and not graded:
            apart[task] = FAILED, f"{whole:.0%}"
        elif nulls:
            label, best = max(nulls.items(), key=lambda item: _goodness(kind, item[1]))
            shown = f"{best.interval.mean:.0%}, full {whole:.0%}, from {full.interval.low:.0%} on"
            alike = best.interval.mean >= max(full.interval.low, whole / 2)
            if kind == "perplexity":
                gain = float(np.log(best.interval.mean / whole))
                shown, alike = f"full gains {gain:.2f} nats per token", gain < LEAST_GAIN
            if alike:
                apart[task] = NEEDLESS, f"{label} at {least}: {shown}"
    return SortedTasks(usable=tuple(task for task in tasks if task not in apart), reasons=apart)


def _goodness(kind: Kind, estimate: Estimate) -> float:
    """The mean, more is better."""
    return estimate.interval.mean * (1 if kind == "accuracy" else -1)


@dataclass(frozen=True, kw_only=True)
class Budgets:
    """The budget axis of one set of records, smallest first."""

    specs: tuple[str, ...]
    """Budgets as they were written."""
    tokens: tuple[float, ...]
    """Mean tokens per KV head of each."""
    relative: bool
    """Whether all were written as a share of the cache."""

    @property
    def positions(self) -> tuple[float, ...]:
        """Where they lie on an axis: percent of the cache, or tokens per KV head."""
        if self.relative:
            return tuple(float(spec.rstrip("%")) for spec in self.specs)
        return self.tokens

    @property
    def label(self) -> str:
        """Title of the axis."""
        unit = "% of the cached tokens" if self.relative else "tokens"
        return f"cache budget, {unit} per KV head"


def budget_axis(records: Iterable[ResultsRow]) -> Budgets:
    """Budgets of records; none where only the full cache and self-sized methods occur."""
    means = {
        spec: float(np.mean([record["budget"] for record in same]))
        for spec, same in group_by(records, itemgetter("budget_spec")).items()
        if spec not in (None, SELF_SIZED)
    }
    specs = sorted(means, key=lambda spec: (means[spec], budget_order(spec)))
    return Budgets(
        specs=tuple(specs),
        tokens=tuple(means[spec] for spec in specs),
        relative=all(spec.endswith("%") for spec in specs),
    )


def budget_order(spec: str) -> tuple[bool, bool, Decimal]:
    """Order of budgets: shares, then token counts, each ascending; self-sized and full last."""
    if spec in (SELF_SIZED, FULL):
        return True, True, Decimal(spec == FULL)
    budget = parse_budget(spec)
    return False, budget.percent is None, budget.percent or Decimal(budget.count or 0)


@dataclass(frozen=True, kw_only=True)
class Choice:
    """The setting chosen for a method."""

    setting: ReportedMethod
    note: str
    """The setting in words, and how it was chosen."""
    tuned: bool
    """Whether kvp tune chose it."""


def choose(
    settings: Iterable[ReportedMethod], tuned: Sequence[tuple[Tuned, str]] = ()
) -> dict[str, Choice]:
    """One setting of every method, by family; `tuned` are results of kvp tune with their split.

    Of several that were tuned, such as seeds of a policy, the one with the best score.
    """
    choices = {}
    for family, of_family in group_by(settings, lambda setting: setting.family).items():
        chosen = [(setting, entry, split) for entry, split in tuned for setting in of_family
                  if _is_chosen(setting, entry)]  # fmt: skip
        best, how = min(of_family, key=_distance_from_default), ""
        if chosen:
            best, entry, split = max(chosen, key=lambda run: run[1].chosen.score)
            how = f", chosen on {split} ({entry.tried} settings)" * (entry.tried > 1)
        elif len(of_family) > 1:
            how = f", the default of {len(of_family)}"
        note = f"{best.details}{how}"
        choices[family] = Choice(setting=best, note=note, tuned=bool(chosen))
    return choices


def _is_chosen(setting: ReportedMethod, entry: Tuned) -> bool:
    """Whether a setting is the chosen one; groups have no name where there is only one."""
    chosen = entry.chosen
    theirs = (entry.method, chosen.variant, chosen.allocator, chosen.protected)
    ours = (setting.method, setting.variant, setting.allocator, setting.protected)
    return ours == theirs and (not entry.group or setting.group in ("", entry.group))


def _distance_from_default(setting: ReportedMethod) -> tuple[bool, int, bool]:
    """Least for a method without preset or options, uniform budgets, protected.

    For a policy, least for the recommended setting: heads compete for one budget, unprotected.
    """
    learned = setting.method == LEARNED
    order = [*(RECOMMENDED if learned else (UNIFORM,)), setting.allocator]
    return setting.variant != "auto", order.index(setting.allocator), setting.protected == learned


@dataclass(frozen=True, kw_only=True)
class Best:
    """The methods that sentences name, at one budget."""

    budget: str
    learned: ReportedMethod | None
    """The first policy, or group of policies."""
    ranked: tuple[ReportedMethod, ...]
    """Methods that are no policies, each in the best setting that counts, the best one first."""
    null: ReportedMethod | None
    """The best null in any of its settings."""
    compared: tuple[ReportedMethod, ...]
    """All that these were picked from: policies, other methods and nulls."""

    @property
    def others(self) -> tuple[ReportedMethod, ...]:
        """The best method besides policies; where there is no policy, the next one, too."""
        return self.ranked[: 1 if self.learned else 2]

    @property
    def settings(self) -> list[ReportedMethod]:
        """Those that there are; the first is the one that all words are about."""
        return [setting for setting in (self.learned, *self.others, self.null) if setting]


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """All methods by one metric under one protocol."""

    kind: Kind
    protocol: str
    records: Sequence[ResultsRow]
    groups: Mapping[str | None, str]
    """Group of every policy (`policy_groups`)."""
    sorted: SortedTasks
    """Which tasks the numbers are over, and which are set apart."""
    unfinished: str
    """What the folder lacks of what was begun (`unfinished_work`); "" where it is whole."""
    grid: Grid
    """Over the usable tasks (all where none is); settings that lack prompts are left out."""
    choices: Mapping[str, Choice]
    """The chosen setting of each method, by family, in display order."""
    results: Results
    """The folder."""
    resamples: int
    """Resamples behind each interval."""

    @property
    def measured(self) -> str:
        """What the numbers are of, in a sentence (`eval.results.folder.describe_measure`)."""
        tasks = self.sorted.usable or self.sorted.tasks
        records = [record for record in self.records if record["task"] in tasks]
        return describe_measure(self.results, records)

    @property
    def conditions(self) -> str:
        """What was measured, of which policies, how, and what was protected, for captions."""
        policies = dict.fromkeys(record["policy"] for record in self.records if record["policy"])
        named = f"policies {', '.join(policies)}; " if policies else ""
        seen = f"{self.protocol}, the {SEEN[self.protocol]} at compression"
        setting, kept = self.results.setting, "no token protected"
        if any(record["protected"] for record in self.records):
            kept = f"protected = first {setting('sinks')} and last {setting('recents')} "
            kept += "tokens always kept"
        return f"{self.measured[:-1]}; {named}{seen}; {kept}"

    def of_task(self, task: str) -> Comparison:
        """One of several tasks, in the settings that are shown for all."""
        reasons = {name: why for name, why in self.sorted.reasons.items() if name == task}
        return replace(
            self, grid=complete(self.tasks[task]),
            sorted=SortedTasks(usable=() if reasons else (task,), reasons=reasons),
            records=[record for record in self.records if record["task"] == task],
        )  # fmt: skip

    @cached_property
    def budgets(self) -> Budgets:
        """The budget axis."""
        return budget_axis(self.records)

    @cached_property
    def tasks(self) -> Mapping[str, Grid]:
        """Numbers by task, also of those that are set apart."""
        return {
            name: estimates(self.kind, part, self.groups, resamples=self.resamples)
            for name, part in group_by(self.records, itemgetter("task")).items()
        }

    @property
    def measure(self) -> str:
        """What is measured (`MEASURES`)."""
        return MEASURES[self.kind]

    @property
    def scale(self) -> int:
        """What a mean is shown times: answers in percent."""
        return 100 if self.kind == "accuracy" else 1

    def estimate(self, family: str, spec: str | None) -> Estimate | None:
        """Estimate of a method in its chosen setting, of the full cache at any budget."""
        if family not in self.choices:
            return None
        return self.grid.get(self.choices[family].setting, {}).get(None if family == FULL else spec)

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
        half = " (half a prompt more at 0 and at 100 %)" if self.kind == "accuracy" else ""
        return f"95 % bootstrap interval over prompts{half}{policies}{alone}"

    @property
    def left_out(self) -> str:
        """Methods without numbers over all prompts, for captions; empty if there are none."""
        partial = [name for name, choice in self.choices.items() if choice.setting not in self.grid]
        lacking = f"; without {', '.join(partial)}, which answered only some of the prompts"
        return lacking * bool(partial)

    @cached_property
    def chosen(self) -> list[ReportedMethod]:
        """The setting of each method that is shown, in display order."""
        return [choice.setting for choice in self.choices.values()]

    @property
    def settings(self) -> list[ReportedMethod]:
        """All settings: presets and allocators, with and without protection, method by method."""
        families = in_order(setting.family for setting in self.grid)
        return sorted(
            self.grid,
            key=lambda item: (
                families.index(item.family), item.variant != "auto", item.variant,
                item.allocator != UNIFORM, item.allocator, not item.protected,
            ),
        )  # fmt: skip

    def minus(self, ours: Estimate, theirs: Estimate) -> Interval | None:
        """The difference, paired by prompt, more is better: of scores, or nats per token.

        None where they share no prompt.
        """
        if prompts_of(ours.scores).isdisjoint(prompts_of(theirs.scores)):
            return None
        return paired_difference(
            ours.scores,
            theirs.scores,
            bounds=(-1, 1) if self.kind == "accuracy" else None,
            weights=ours.weights,
            resamples=self.resamples,
        )

    @cached_property
    def best(self) -> Best | None:
        """`best_at` 12.5 %, or else the middle one of the budgets of most methods."""
        number = Counter(
            spec for setting in self.chosen if setting.method not in (FULL, ORACLE, *NULLS)
            for spec in self.grid.get(setting, ()) if spec
        )  # fmt: skip
        del number[SELF_SIZED]
        budgets = [spec for spec in number if number[spec] == max(number.values())]
        ordered = sorted(budgets, key=budget_order)
        middle = ordered[len(ordered) // 2] if ordered else ""
        return self.best_at(USUAL_BUDGET if USUAL_BUDGET in budgets else middle)

    def best_at(self, budget: str) -> Best | None:
        """The methods that sentences name at a budget.

        None where no method was run at it, no task is usable, or the folder is unfinished. Each
        method counts in the setting that is shown; in every one do nulls and, beside a policy,
        methods that were not tuned. "Best" is by the prompts shown, which favours them.
        """
        grid = self.grid
        at = [setting for setting in self.settings if budget in grid[setting]]
        nulls = [setting for setting in at if setting.method in NULLS]
        bounds = (FULL, ORACLE, *NULLS)
        shown = [setting for setting in at if setting in self.chosen]
        if any(setting.method == LEARNED for setting in shown):
            shown += [setting for setting in at if setting.method != LEARNED
                      and not self.choices[setting.family].tuned]  # fmt: skip
        compared = [setting for setting in at if setting in shown and setting.method not in bounds]
        if not compared or self.unfinished or not self.sorted.usable:
            return None

        def rank(methods: Iterable[ReportedMethod]) -> list[ReportedMethod]:
            return sorted(methods, key=lambda method: -_goodness(self.kind, grid[method][budget]))

        learned = next((setting for setting in compared if setting.method == LEARNED), None)
        ranked = rank(setting for setting in compared if setting.method != LEARNED)
        by_method = group_by(ranked, lambda setting: setting.family).values()
        return Best(
            budget=budget,
            learned=learned,
            ranked=tuple(of[0] for of in by_method),
            null=next(iter(rank(nulls)), None),
            compared=(*compared, *nulls),
        )

    @cached_property
    def gaps(self) -> Mapping[tuple[ReportedMethod, str], Interval]:
        """What methods have over the first of `best`, by setting and budget, paired by prompt.

        Of the settings shown, and of all nulls.
        """
        if self.best is None:
            return {}
        first = self.best.settings[0]
        lead = self.grid[first]
        return {
            (setting, spec): gap
            for setting in dict.fromkeys((*self.chosen, *self.best.compared)) if setting != first
            for spec, of in self.grid.get(setting, {}).items()
            if spec and spec in lead and (gap := self.minus(of, lead[spec]))
        }  # fmt: skip

    @property
    def tests(self) -> int:
        """How many differences one test corrects for: `gaps`, and where the first method is no
        policy but the best of all on these prompts, those of every other pair.
        """
        methods = len(self.best.compared) if self.best and not self.best.learned else 2
        return len(self.gaps) * max(2, methods) // 2

    @cached_property
    def told(self) -> set[tuple[ReportedMethod, str]]:
        """Keys of the `gaps` that are not 0, wherever they are shown (Holm)."""
        return resolved_keys(self.gaps, self.tests)

    def equal_counts(self, setting: ReportedMethod) -> ReportedMethod | None:
        """A policy's setting with as many tokens in every head, if run."""
        equal = replace(setting, allocator=UNIFORM)
        return equal if setting.method == LEARNED and equal in self.grid else None

    def told_of(
        self, best: Best
    ) -> tuple[Mapping[tuple[ReportedMethod, str], Interval], set[tuple[ReportedMethod, str]]]:
        """`gaps` and `told`; where another method is the first, those of the named ones alone."""
        first, *others = best.settings
        if self.best and first == self.best.settings[0]:
            return self.gaps, self.told
        spec = best.budget
        lead = self.grid[first][spec]
        paired = {(setting, spec): self.minus(self.grid[setting][spec], lead) for setting in others}
        gaps = {key: gap for key, gap in paired.items() if gap is not None}
        return gaps, resolved_keys(gaps, self.tests)

    def over_null(self, setting: ReportedMethod, spec: str | None) -> Interval | None:
        """What a setting has over the best null of its protection, paired by prompt.

        Nulls score nothing (`policies.registry`), so every method has to beat the best one. It is
        the best on these very prompts, which favours the nulls. None for nulls and the full cache,
        and where no null was run.
        """
        nulls = [
            budgets[spec]
            for null, budgets in self.grid.items()
            if null.method in NULLS and null.protected == setting.protected and spec in budgets
        ]
        ours = self.grid.get(setting, {}).get(spec)
        if setting.method in (FULL, *NULLS) or not nulls or ours is None:
            return None
        return self.minus(ours, max(nulls, key=lambda estimate: _goodness(self.kind, estimate)))


def compare(results: Results, kind: Kind, protocol: str, *, resamples: int) -> Comparison | None:
    """Compare all methods of a results folder; None without records of this kind."""
    records = [record for record in results.in_plan
               if record["protocol"] == protocol and record[FIELDS[kind]] is not None]  # fmt: skip
    if not records:
        return None
    groups = policy_groups(results.in_plan)
    tasks = sort_tasks(kind, records, resamples=resamples)
    used = [record for record in records if record["task"] in tasks.usable] or records
    all_methods = estimates(kind, used, groups, resamples=resamples)
    grid = complete(all_methods)
    tuned = [
        (entry, settings.split) for settings in results.tuned for entry in settings.methods
        if entry.protocol == protocol
    ]  # fmt: skip
    # A setting that lacks prompts is shown only where its method has no other.
    choices = {**choose(all_methods, tuned), **choose(grid, tuned)}
    return Comparison(
        kind=kind,
        protocol=protocol,
        records=records,
        groups=groups,
        sorted=tasks,
        unfinished=unfinished_work(results),
        grid=grid,
        choices={family: choices[family] for family in in_order(choices)},
        results=results,
        resamples=resamples,
    )


def compare_all(results: Results, *, resamples: int) -> list[Comparison]:
    """All comparisons of a results folder: answers, then given replies, protocol by protocol."""
    protocols = dict.fromkeys(record["protocol"] for record in results.in_plan)
    comparisons = (compare(results, kind, protocol, resamples=resamples)
                   for kind in FIELDS for protocol in protocols)  # fmt: skip
    return [comparison for comparison in comparisons if comparison is not None]


def in_order(families: Iterable[str]) -> list[str]:
    """Each once: full cache, oracle, learned policies, then the others in the given order."""
    method = {family: family.partition("/")[0] for family in families}
    first = (FULL, ORACLE, LEARNED)
    return sorted(method, key=lambda family: (*first, method[family]).index(method[family]))


def resolved_keys(gaps: Mapping[Key, Interval], comparisons: int | None = None) -> set[Key]:
    """Keys of the differences of one table that are not 0 (`holm`)."""
    differ = holm(list(gaps.values()), comparisons)
    return {key for key, differs in zip(gaps, differ, strict=True) if differs}
