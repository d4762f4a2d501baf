"""Which setting of a method a figure and the headline table show, and who is compared with whom.

One setting serves the whole curve: the one with the best mean over the budgets that all settings of
the method have. It is chosen on a validation folder where one is given, else on the prompts shown,
which favours methods with many settings over those with few; the page says which.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

import numpy as np

from eval.report.aggregates import FULL, LEARNED, ORACLE, Grid, Setting
from eval.stats import Interval, paired_difference

CLOSE = 0.02
"""Distance to the full cache, as a share of 1, that counts as reaching it."""


@dataclass(frozen=True, kw_only=True)
class Choice:
    """The setting that stands for a method."""

    setting: Setting
    settings: int
    """How many there were to choose from."""
    validated: bool
    """Whether another folder's prompts decided."""

    @property
    def name(self) -> str:
        """The method."""
        return self.setting.family if self.setting.how else "full cache"

    @property
    def note(self) -> str:
        """The setting that stands for it, and how it was chosen."""
        if self.settings == 1:
            return self.setting.how
        chosen = "chosen on validation" if self.validated else f"best of {self.settings}"
        return f"{self.setting.how}, {chosen}"

    @property
    def label(self) -> str:
        """Name in legends."""
        return f"{self.name} ({self.note})" if self.note else self.name


def choose(
    grid: Grid, *, higher_is_better: bool, validation: Grid | None = None
) -> dict[str, Choice]:
    """The setting to show for every method of a grid, by family, in the order of the grid."""
    families: dict[str, list[Setting]] = {}
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


def outstanding(
    grid: Grid, choices: Mapping[str, Choice], most: int, *, higher_is_better: bool
) -> list[str]:
    """Families that a figure of at most `most` lines shows at first.

    References, learned policies and own sizes first, then the best by their mean over the budgets
    that all the others have.
    """
    settings = {family: choice.setting for family, choice in choices.items()}
    always = [
        family for family, setting in settings.items()
        if setting.own or setting.method in (FULL, ORACLE, LEARNED)
    ]  # fmt: skip
    others = {family: setting for family, setting in settings.items() if family not in always}
    if not others:
        return always
    sign = 1.0 if higher_is_better else -1.0
    means = _means(grid, list(others.values()))
    best = sorted(others, key=lambda family: -sign * means[others[family]])
    return [*always, *best[: max(0, most - len(always))]]


def _means(grid: Grid, settings: Collection[Setting]) -> Mapping[Setting, float]:
    """Mean over the budgets that all settings have (over its own where they share none)."""
    shared = set.intersection(*(set(grid[setting]) for setting in settings))
    return {
        setting: float(
            np.mean([grid[setting][spec].interval.mean for spec in shared or set(grid[setting])])
        )
        for setting in settings
    }


@dataclass(frozen=True, kw_only=True)
class Contest:
    """A policy against the best attention-free baseline at one budget."""

    family: str
    """Policy group."""
    baseline: str
    """Family of the baseline."""
    difference: Interval
    """Ours minus theirs, over the prompts both answered."""
    both_reach_full: bool
    """Whether both means are within `CLOSE` of the full cache's (or above it)."""


def best_baselines(
    grid: Grid,
    choices: Mapping[str, Choice],
    spec: str,
    attention_free: Collection[str],
    *,
    higher_is_better: bool = True,
) -> list[str]:
    """Families of the attention-free baselines with the best shown mean at a budget."""
    means = {
        family: grid[choice.setting][spec].interval.mean
        for family, choice in choices.items()
        if choice.setting.method in attention_free
        and choice.setting.method not in (FULL, ORACLE, LEARNED)
        and spec in grid[choice.setting]
    }
    if not means:
        return []
    best = max(means.values()) if higher_is_better else min(means.values())
    return [family for family, mean in means.items() if mean == best]


def contests(
    grid: Grid,
    choices: Mapping[str, Choice],
    spec: str,
    attention_free: Collection[str],
    *,
    resamples: int,
) -> list[Contest]:
    """Every policy group against the best attention-free baseline shown at a budget."""
    best = best_baselines(grid, choices, spec, attention_free)
    if not best:
        return []
    rival = grid[choices[best[0]].setting][spec]
    full = choices.get(FULL)
    found = []
    for family, choice in choices.items():
        if choice.setting.method != LEARNED or spec not in grid[choice.setting]:
            continue
        ours = grid[choice.setting][spec]
        if not set(ours.values) & set(rival.values):
            continue
        found.append(
            Contest(
                family=family,
                baseline=best[0],
                difference=paired_difference(ours.values, rival.values, resamples=resamples),
                both_reach_full=full is not None
                and min(ours.interval.mean, rival.interval.mean)
                >= grid[full.setting][None].interval.mean - CLOSE,
            )
        )
    return found
