"""Methods as they were run: the identity that rows, tables, sentences and figures share.

A method is reported in its setting: preset, allocator, protection, and for `kvp` the group of
policies that differ only in their training seed. Where one setting of a method is shown, it is the
same at every budget, and the prompts shown never choose it: it is the one that kvp tune chose on
others, else the method's default among those that were run.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal

import numpy as np

from eval.results.records import FULL, LEARNED, ORACLE, SELF_SIZED, UNIFORM, group_by, method_label
from eval.results.shapes import MethodFields, ResultsRow
from eval.tune.tuned_settings import Tuned
from kvp.budgets import parse_budget

PROTECTED = " +p"
"""What a label ends with where first and last tokens are always kept."""
RECOMMENDED = ("global", "ada")
"""Allocators of a policy, the one that is shown first (docs/decisions.md has the reasons)."""


@dataclass(frozen=True, kw_only=True)
class MethodSetting:
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

    @classmethod
    def of(cls, record: MethodFields, groups: Mapping[str | None, str]) -> MethodSetting:
        """That of a record of any results file; `groups` are those of the policies."""
        return cls(
            method=record["method"],
            variant=record["variant"],
            group=groups[record["policy"]],
            protected=record["protected"],
            allocator=record["allocator"],
            self_sized=record["budget_spec"] == SELF_SIZED,
        )

    @property
    def _named(self) -> str:
        return f"{self.method}/{self.group}" if self.group else self.method

    @property
    def family(self) -> str:
        """Name of a line in a figure: the method, with its policy group.

        A method that sizes the cache itself is a separate family: it has no budgets to compare
        at.
        """
        return f"{self._named}+{self.allocator}" if self.self_sized else self._named

    @property
    def name(self) -> str:
        """The family in words."""
        return "full cache" if self.method == FULL else self.family

    @property
    def label(self) -> str:
        """Method, preset and allocator as `--methods` has them, `+p` where it is protected."""
        label = method_label(self._named, self.variant, self.allocator)
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

    def is_chosen(self, entry: Tuned) -> bool:
        """Whether kvp tune chose it; groups have no name where there is only one."""
        chosen = entry.chosen
        theirs = (entry.method, chosen.variant, chosen.allocator, chosen.protected)
        ours = (self.method, self.variant, self.allocator, self.protected)
        return ours == theirs and (not entry.group or self.group in ("", entry.group))

    def distance_from_default(self) -> tuple[bool, int, bool]:
        """Least for a method without preset or options, uniform budgets, protected.

        For a policy, least for the recommended one: heads compete for one budget, unprotected.
        """
        learned = self.method == LEARNED
        order = [*(RECOMMENDED if learned else (UNIFORM,)), self.allocator]
        return self.variant != "auto", order.index(self.allocator), self.protected == learned


def choose_settings(
    settings: Iterable[MethodSetting], tuned: Sequence[tuple[Tuned, str]] = ()
) -> dict[MethodSetting, str]:
    """One setting per family, with a note: what it is, and how it was chosen.

    `tuned` are results of kvp tune with their split. Of several settings that were tuned, such as
    seeds of a policy, the one with the best score.
    """
    chosen: dict[MethodSetting, str] = {}
    for of_family in group_by(settings, lambda setting: setting.family).values():
        best, how = min(of_family, key=MethodSetting.distance_from_default), ""
        found = [(one, *of) for of in tuned for one in of_family if one.is_chosen(of[0])]
        if found:
            best, entry, split = max(found, key=lambda run: run[1].chosen.score)
            how = f", chosen on {split} ({entry.tried} settings)" * (entry.tried > 1)
        elif len(of_family) > 1:
            how = f", the default of {len(of_family)}"
        chosen[best] = f"{best.details}{how}"
    return chosen


def sort_families(families: Iterable[str]) -> list[str]:
    """Each once: full cache, oracle, learned policies, then the others in the given order."""
    method = {family: family.partition("/")[0] for family in families}
    first = (FULL, ORACLE, LEARNED)
    return sorted(method, key=lambda family: (*first, method[family]).index(method[family]))


def budget_axis(records: Iterable[ResultsRow]) -> dict[str, float]:
    """Budgets as they were written and their mean tokens per KV head, smallest first.

    None where only the full cache and self-sized methods occur.
    """
    budgets = group_by(records, lambda record: record["budget_spec"])
    means = {spec: float(np.mean([record["budget"] for record in same]))
             for spec, same in budgets.items() if spec not in (None, SELF_SIZED)}  # fmt: skip
    return dict(sorted(means.items(), key=lambda item: (item[1], budget_order(item[0]))))


def are_shares(budgets: Iterable[str]) -> bool:
    """Whether all were written as a share of the cache."""
    return all(spec.endswith("%") for spec in budgets)


def budget_order(spec: str) -> tuple[bool, bool, Decimal]:
    """Order of budgets: shares, then token counts, each ascending; self-sized and full last."""
    if spec in (SELF_SIZED, FULL):
        return True, True, Decimal(spec == FULL)
    budget = parse_budget(spec)
    return False, budget.percent is None, budget.percent or Decimal(budget.count or 0)
