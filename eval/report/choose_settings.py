"""The one setting (preset or options, allocator, protection) that a method is shown in.

It is the same at every budget, and the prompts shown never choose it. It is the one that kvp tune
chose; else the one with the best mean, over the budgets that all its settings have, in a folder of
validation results; else the method's default among those that were run.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from eval.report.aggregates import Grid, ReportedMethod
from eval.results.records import FULL, LEARNED, UNIFORM
from eval.tune.settings_file import Tuned

RECOMMENDED = "global"
"""Allocator that policies are trained for."""


@dataclass(frozen=True, kw_only=True)
class Choice:
    """The setting chosen for a method."""

    setting: ReportedMethod
    candidates: int
    """Settings it was chosen from."""
    chosen_on: str | None
    """What chose it, `validation` or `validation (48 settings)`; None for the default."""

    @property
    def name(self) -> str:
        """Name of the method."""
        return self.setting.family if self.setting.details else "full cache"

    @property
    def note(self) -> str:
        """The setting, and how it was chosen."""
        if self.candidates == 1:
            return self.setting.details
        if self.chosen_on is None:
            return f"{self.setting.details}, the default of {self.candidates}"
        return f"{self.setting.details}, chosen on {self.chosen_on}"

    @property
    def legend(self) -> str:
        """Name in legends: method, preset and allocator, without the protection."""
        setting = self.setting
        if setting.method == FULL:
            return self.name
        preset = "" if setting.variant == "auto" else f":{setting.variant}"
        implied = setting.allocator == UNIFORM or setting.self_sized
        return f"{self.name}{preset}{'' if implied else f'+{setting.allocator}'}"


def choose(
    grid: Grid,
    validation: Grid | None = None,
    tuned: Sequence[tuple[Tuned, str]] = (),
    *,
    higher_is_better: bool = True,
) -> dict[str, Choice]:
    """One setting of every method, by family.

    The one that kvp tune chose (with its split), the best of several; else the best on `validation`
    where that has all settings of the method; else the default.
    """
    families: dict[str, list[ReportedMethod]] = {}
    for setting in grid:
        families.setdefault(setting.family, []).append(setting)
    sign = 1.0 if higher_is_better else -1.0
    choices = {}
    for family, settings in families.items():
        found = [(one, *entry) for entry in tuned for one in settings if _is_chosen(one, entry[0])]
        if found:
            best, entry, split = max(found, key=lambda each: each[1].chosen.score)
            words = f"{split} ({entry.tried} settings)"
            choices[family] = Choice(setting=best, candidates=entry.tried, chosen_on=words)
        elif validation is not None and all(setting in validation for setting in settings):
            means = means_of(validation, settings)
            best = max(settings, key=lambda setting: (sign * means[setting], setting.protected))
            choices[family] = Choice(setting=best, candidates=len(settings), chosen_on="validation")
        else:
            best = min(settings, key=_distance_from_default)
            choices[family] = Choice(setting=best, candidates=len(settings), chosen_on=None)
    return choices


def _is_chosen(setting: ReportedMethod, entry: Tuned) -> bool:
    """Whether a setting is the chosen one; groups have no name where there is only one."""
    chosen = entry.chosen
    theirs = (entry.method, chosen.variant, chosen.allocator, chosen.protected)
    ours = (setting.method, setting.variant, setting.allocator, setting.protected)
    return ours == theirs and (not entry.group or setting.group in ("", entry.group))


def _distance_from_default(setting: ReportedMethod) -> tuple[bool, bool, bool]:
    """Least for a method without preset or options, uniform budgets, protected.

    For a policy, least for the recommended setting: heads compete for one budget, unprotected.
    """
    if setting.method == LEARNED:
        return setting.variant != "auto", setting.allocator != RECOMMENDED, setting.protected
    return setting.variant != "auto", setting.allocator != UNIFORM, not setting.protected


def means_of(grid: Grid, settings: Collection[ReportedMethod]) -> Mapping[ReportedMethod, float]:
    """Mean over the budgets that all settings have; over all of each where they share none."""
    shared = set.intersection(*(set(grid[setting]) for setting in settings))
    return {
        setting: float(
            np.mean([grid[setting][spec].interval.mean for spec in shared or set(grid[setting])])
        )
        for setting in settings
    }
