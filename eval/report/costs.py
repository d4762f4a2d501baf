"""Cost-per-budget curves: per head, over all heads, and their areas against the oracle's.

The cost of a budget is the share of future attention that the evicted tokens would have received
(KVP paper, section 4.3: minus the per-budget reward). Policies of one group are averaged.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from eval.report.aggregates import ORACLE, Setting, setting_of
from eval.results.records import Row
from eval.stats import area_ratio

Head = tuple[int, int]
"""(layer, KV head)."""


@dataclass(frozen=True, kw_only=True)
class HeadCurve:
    """Cost against budget of one head."""

    budgets: tuple[float, ...]
    """Share of the cache kept, 0 to 1."""
    cost: tuple[float, ...]
    """Share of future attention lost, 0 to 1."""


Costs = Mapping[Setting, Mapping[Head, HeadCurve]]


def head_curves(
    curves: Iterable[Row], groups: Mapping[str | None, str]
) -> dict[Setting, dict[Head, HeadCurve]]:
    """Curves of one protocol by setting and head."""
    found: dict[tuple[Setting, Head], list[Row]] = defaultdict(list)
    for row in curves:
        found[setting_of(row, groups), (row["layer"], row["head"])].append(row)
    settings: dict[Setting, dict[Head, HeadCurve]] = {}
    for (setting, head), rows in found.items():
        cost: NDArray[np.float64] = np.mean([row["cost"] for row in rows], axis=0)
        settings.setdefault(setting, {})[head] = HeadCurve(
            budgets=tuple(rows[0]["budgets"]), cost=tuple(map(float, cost))
        )
    return settings


def mean_curve(heads: Mapping[Head, HeadCurve]) -> HeadCurve:
    """Mean over heads, which is the sum over heads divided by their number."""
    cost: NDArray[np.float64] = np.mean([curve.cost for curve in heads.values()], axis=0)
    first = next(iter(heads.values()))
    return HeadCurve(budgets=first.budgets, cost=tuple(map(float, cost)))


@dataclass(frozen=True, kw_only=True)
class Area:
    """Area under the cost curves of one setting, summed over heads."""

    mean: float
    """Mean over heads (the sum divided by their number) and policies."""
    skill: float
    """Mean over heads and policies: 1 as the oracle, 0 as random order."""
    ratios: tuple[float, ...]
    """Sum over heads divided by the oracle's, one per policy; empty without an oracle."""


def areas(curves: Sequence[Row], groups: Mapping[str | None, str]) -> dict[Setting, Area]:
    """Areas of one protocol; oracle and method both with protected tokens, or both without."""
    found: dict[Setting, list[Row]] = defaultdict(list)
    for row in curves:
        found[setting_of(row, groups)].append(row)
    with_oracle = {setting.protected for setting in found if setting.method == ORACLE}
    result = {}
    for setting, rows in found.items():
        policies = dict.fromkeys(row["policy"] for row in rows)
        ratios: tuple[float, ...] = ()
        if setting.protected in with_oracle:
            ratios = tuple(_ratio(curves, setting, policy, rows[0]) for policy in policies)
        skills = [row["skill"] for row in rows if row["skill"] is not None]
        result[setting] = Area(
            mean=float(np.mean([row["area"] for row in rows])),
            skill=float(np.mean(skills)) if skills else float("nan"),
            ratios=ratios,
        )
    return result


def _ratio(curves: Sequence[Row], setting: Setting, policy: str | None, row: Row) -> float:
    selected = {"method": setting.method, "variant": setting.variant, "policy": policy}
    return area_ratio(
        curves, selected, protocol=row["protocol"], protected=setting.protected, reference=ORACLE
    )


def shown_curves(costs: Costs, by_area: Mapping[Setting, Area]) -> dict[str, Setting]:
    """One setting per family for the figures: protected where all can be, smallest area."""
    protected = any(setting.protected for setting in costs)
    shown: dict[str, Setting] = {}
    for setting in costs:
        if setting.protected != protected:
            continue
        other = shown.get(setting.family)
        if other is None or by_area[setting].mean < by_area[other].mean:
            shown[setting.family] = setting
    return shown
