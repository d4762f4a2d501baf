"""The one setting (preset or options, allocator, protection) that a method is shown in.

It is the same at every budget, and the prompts shown never choose it: it is the one that kvp tune
chose on others, else the method's default among those that were run.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from eval.records import FULL, LEARNED, UNIFORM
from eval.report.aggregates import ReportedMethod
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
    """Split that chose it; None for the default."""
    open_ends: tuple[str, ...] = ()
    """Options whose chosen number is at an end of what kvp tune tried."""

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
        return f"{self.setting.details}, chosen on {self.chosen_on} ({self.candidates} settings)"

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
    settings: Iterable[ReportedMethod], tuned: Sequence[tuple[Tuned, str]] = ()
) -> dict[str, Choice]:
    """One setting of every method, by family; `tuned` are results of kvp tune with their split.

    Of several that were tuned, such as seeds of a policy, the one with the best score.
    """
    families: dict[str, list[ReportedMethod]] = {}
    for setting in settings:
        families.setdefault(setting.family, []).append(setting)
    choices = {}
    for family, of_family in families.items():
        found = [(one, *entry) for entry in tuned for one in of_family if _is_chosen(one, entry[0])]
        if found:
            best, entry, split = max(found, key=lambda each: each[1].chosen.score)
            choices[family] = Choice(
                setting=best,
                candidates=entry.tried,
                chosen_on=split,
                open_ends=entry.open_ends,
            )
        else:
            best = min(of_family, key=_distance_from_default)
            choices[family] = Choice(setting=best, candidates=len(of_family), chosen_on=None)
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
