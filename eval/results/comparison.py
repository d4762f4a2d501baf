"""What methods score under one protocol: every number.

Tasks that cannot tell methods apart are set apart (`sort_tasks`). An unfinished folder ranks no
method. `eval.results.sentences` puts the numbers into words.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product
from operator import itemgetter

from eval.results import estimates, stats
from eval.results.folder import Results
from eval.results.method_setting import MethodSetting, budget_axis, sort_families
from eval.results.record_names import ORACLE, SELF_SIZED
from eval.results.record_schemas import ResultsRow
from eval.results.setting_choice import choose_settings
from eval.results.stats import Interval
from eval.results.task_sorting import SortedTasks, sort_tasks
from kvp.grouping import group_by
from kvp.names import FULL, LEARNED, NULLS, UNIFORM

USUAL_BUDGET = "12.5%"
"""The budget that sentences are about, if most methods ran at it; else the middle of such ones."""


@dataclass(frozen=True, kw_only=True)
class Best:
    """The methods that sentences are about, at one budget."""

    budget: str
    lead: MethodSetting
    """The first policy, or without one the best method. The others are compared with it."""
    rival: MethodSetting | None
    """The best method that is no policy; without a policy the second best one."""
    null: MethodSetting | None
    """The best null, in any of its settings."""
    ranked: list[MethodSetting]
    """Methods that are no policies, each in the best setting that counts, the best one first."""
    compared: list[MethodSetting]
    """All settings that they were picked from: policies, other methods and nulls."""

    @property
    def learned(self) -> bool:
        """Whether `lead` is a policy, or a group of policies."""
        return self.lead.method == LEARNED

    @property
    def others(self) -> list[MethodSetting]:
        """`rival` and `null`, as far as there are such methods."""
        return [setting for setting in (self.rival, self.null) if setting is not None]


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """All methods by one metric under one protocol."""

    kind: estimates.Kind
    protocol: str
    records: Sequence[ResultsRow]
    task_sort: SortedTasks
    unfinished: str
    """What the folder lacks (`Results.unfinished`); "" where it is complete."""
    cells: estimates.Cells
    """Over the usable tasks (all where none is); settings that lack prompts are left out."""
    choices: Mapping[MethodSetting, str]
    """The setting that is shown of each method, in display order, and how it was chosen."""
    results: Results

    @property
    def measure(self) -> estimates.Measure:
        """How its numbers are written."""
        return estimates.MEASURES[self.kind]

    @property
    def protects(self) -> bool:
        """Whether protection is of any tokens, and some setting has it."""
        kept = self.results.setting("sinks"), self.results.setting("recents")
        return kept != (0, 0) and any(record["protected"] for record in self.records)

    @cached_property
    def budgets(self) -> Mapping[str, float]:
        """The budgets and their sizes (`budget_axis`)."""
        return budget_axis(self.records)

    @cached_property
    def tasks(self) -> Mapping[str, estimates.Cells]:
        """Numbers by task, also of those that are set apart."""
        return {
            name: estimates.make_estimates(self.kind, part, self.results.policy_groups)
            for name, part in group_by(self.records, itemgetter("task")).items()
        }

    @property
    def full(self) -> estimates.Estimate | None:
        """The estimate of the full cache; None where it was not run."""
        return estimates.full_of(self.cells)

    @cached_property
    def settings(self) -> list[MethodSetting]:
        """All settings: presets and allocators, with and without protection, method by method."""
        settings = dict.fromkeys(setting for setting, _ in self.cells)
        families = [*sort_families(settings)]
        return sorted(settings, key=lambda it: (families.index(it.family), it.place_in_family))

    def minus(self, ours: estimates.Estimate, theirs: estimates.Estimate) -> Interval | None:
        """`ours` minus `theirs`, paired; None where they share no prompt.

        In scores (0 to 1) or in nats per token; more is better.
        """
        if ours.prompts.isdisjoint(theirs.prompts):
            return None
        if (ours, theirs) not in self._paired:
            gap = stats.paired_difference(ours.scores, theirs.scores, weights=ours.weights)
            self._paired[ours, theirs] = gap
        return self._paired[ours, theirs]

    @cached_property
    def _paired(self) -> dict[tuple[estimates.Estimate, estimates.Estimate], Interval]:
        return {}

    @cached_property
    def best(self) -> Best | None:
        """`best_at` `USUAL_BUDGET` if most methods ran at it, else at the middle such budget."""
        bounds = (FULL, ORACLE, *NULLS)
        shown = [setting for setting in self.choices if setting.method not in bounds]
        number = Counter(spec for setting, spec in self.cells if setting in shown)
        del number[SELF_SIZED]
        budgets = [spec for spec in number if number[spec] == max(number.values())]
        ordered = [spec for spec in self.budgets if spec in budgets]
        middle = ordered[len(ordered) // 2] if ordered else ""
        return self.best_at(USUAL_BUDGET if USUAL_BUDGET in budgets else middle)

    def best_at(self, budget: str) -> Best | None:
        """The methods that sentences are about at a budget.

        None where no method was run at it, no task is usable, or the folder is unfinished. Each
        method counts in the setting that is shown. Nulls, and beside a policy also untuned methods,
        count in every setting. The best are picked on the prompts shown, which favours them.
        """
        run = [setting for setting in self.settings if (setting, budget) in self.cells]
        nulls = [setting for setting in run if setting.method in NULLS]
        counting = {setting for setting in run if setting in self.choices}
        if any(setting.method == LEARNED for setting in counting):
            chosen = [entry for entry, _ in self.results.tuned_under(self.protocol)]
            tuned = {it.family for it in self.choices if any(entry.chose(it) for entry in chosen)}
            counting.update(it for it in run if it.method != LEARNED and it.family not in tuned)
        compared = [it for it in run if it in counting and it.method not in (FULL, ORACLE, *NULLS)]
        if not compared or self.unfinished or not self.task_sort.usable:
            return None

        def rank(settings: Iterable[MethodSetting]) -> list[MethodSetting]:
            goodness = {it: self.measure.goodness(self.cells[it, budget]) for it in settings}
            return sorted(goodness, key=lambda it: (-goodness[it], it not in self.choices))

        policies = [setting for setting in compared if setting.method == LEARNED]
        others = rank(setting for setting in compared if setting.method != LEARNED)
        ranked = [family[0] for family in group_by(others, lambda setting: setting.family).values()]
        lead, rival, *_ = *policies[:1], *ranked, None
        null = next(iter(rank(nulls)), None)
        return Best(
            budget=budget, lead=lead, rival=rival, null=null,
            ranked=ranked, compared=[*compared, *nulls],
        )  # fmt: skip

    @cached_property
    def gaps(self) -> Mapping[estimates.CellKey, Interval]:
        """What settings shown and nulls have more than the lead of `best`, paired."""
        if self.best is None:
            return {}
        gaps = dict[estimates.CellKey, Interval]()
        others = {*self.choices, *self.best.compared} - {self.best.lead}
        for (setting, spec), estimate in self.cells.items():
            lead = self.cells.get((self.best.lead, spec))
            if setting in others and lead and (gap := self.minus(estimate, lead)):
                gaps[setting, spec] = gap
        return gaps

    @cached_property
    def test_count(self) -> int:
        """Number of differences that Holm's correction counts, over all budgets.

        A policy comes first whatever it scores: at a budget with n settings it has n - 1
        differences, and a second policy, where `best` and `best_at` begin with two, as many.
        Any other first method was picked by its score from c settings: then all pairs with one of
        the c count. For example, 5 settings at 2 budgets have 2 * 4 = 8 differences with a policy;
        without one 2 * 10 = 20 if c is 5, and 2 * 9 = 18 if c is 3.
        """
        ordered = 0  # a pair counts twice, once for each order
        for budget in self.budgets:
            if self.best and (at := self.best_at(budget)):
                run = {setting for setting, spec in self.cells if spec == budget}
                firsts = run & {self.best.lead, at.lead}
                others = len(run.intersection((*self.choices, *at.compared))) - 1
                if all(first.method == LEARNED for first in firsts):
                    ordered += 2 * len(firsts) * others
                else:
                    picked_from = len(at.compared) or 1
                    ordered += picked_from * (2 * others + 1 - picked_from)
        return ordered // 2

    @cached_property
    def significant(self) -> set[estimates.CellKey]:
        """Keys of the `gaps` that are significant (`stats.holm`)."""
        return stats.holm(self.gaps, self.test_count)

    def differences(
        self, best: Best
    ) -> tuple[Mapping[MethodSetting, Interval], set[MethodSetting]]:
        """The lead of `best` minus each other one, and which differences are significant.

        They are tested together with `gaps`, or, if `best` has another lead, alone.
        """
        lead = self.cells[best.lead, best.budget]
        cells = {other: self.cells[other, best.budget] for other in best.others}
        gaps = {other: gap for other in cells if (gap := self.minus(cells[other], lead))}
        significant = stats.holm(gaps, self.test_count)
        if self.best and best.lead == self.best.lead:
            significant = {setting for setting, spec in self.significant if spec == best.budget}
        return {other: -gap for other, gap in gaps.items()}, significant

    def equal_counts(self, setting: MethodSetting) -> MethodSetting | None:
        """The setting with equal counts in all heads of the same policy, if it was run."""
        equal = replace(setting, allocator_name=UNIFORM)
        return equal if setting.method == LEARNED and equal in self.settings else None

    def over_null(self, setting: MethodSetting, spec: str) -> Interval | None:
        """A setting minus the best null with the same protection, paired by prompt.

        The null is the best on these very prompts, which favours it. None for nulls and the full
        cache, and where no null was run.
        """
        nulls = [
            cell
            for (null, budget), cell in self.cells.items()
            if null.method in NULLS and null.protected == setting.protected and budget == spec
        ]
        ours = self.cells.get((setting, spec))
        if setting.method in (FULL, *NULLS) or not nulls or ours is None:
            return None
        return self.minus(ours, max(nulls, key=self.measure.goodness))


def compare_methods(results: Results, kind: estimates.Kind, protocol: str) -> Comparison | None:
    """Compare all methods of a results folder; None without records of this kind."""
    field = estimates.MEASURES[kind].field
    of_protocol = (record for record in results.in_plan if record["protocol"] == protocol)
    records = [record for record in of_protocol if record[field] is not None]
    if not records:
        return None
    tasks = sort_tasks(kind, records)
    used = [record for record in records if record["task"] in tasks.usable] or records
    everything = estimates.make_estimates(kind, used, results.policy_groups)
    # Only settings that answered all prompts are compared: a folder may have been extended since.
    prompts = {unit for estimate in everything.values() for unit in estimate.prompts}
    cells = {key: estimate for key, estimate in everything.items() if estimate.prompts == prompts}
    settings = dict.fromkeys(setting for setting, _ in everything)
    complete = {setting for setting, _ in cells}
    families, order = {setting.family for setting in complete}, [*sort_families(settings)]
    # A setting that lacks prompts is shown only where its method has no other.
    candidates = [it for it in settings if it in complete or it.family not in families]
    candidates.sort(key=lambda setting: order.index(setting.family))
    return Comparison(
        kind=kind, protocol=protocol, records=records, task_sort=tasks,
        unfinished=results.unfinished, cells=cells, results=results,
        choices=choose_settings(candidates, results.tuned_under(protocol)),
    )  # fmt: skip


def compare_all(results: Results) -> list[Comparison]:
    """All comparisons of a results folder: answers, then given replies, protocol by protocol."""
    protocols = dict.fromkeys(record["protocol"] for record in results.in_plan)
    pairs = product(estimates.MEASURES, protocols)
    comparisons = (compare_methods(results, kind, protocol) for kind, protocol in pairs)
    return [comparison for comparison in comparisons if comparison is not None]
