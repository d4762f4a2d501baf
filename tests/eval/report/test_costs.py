"""Cost curves: means over policies and heads, areas against the oracle's."""

from __future__ import annotations

from typing import Any

import pytest

from eval.report.aggregates import ReportedMethod
from eval.report.costs import areas, head_curves, mean_curve, shown_curves

Record = dict[str, Any]
GROUPS = {None: "", "seed0": "", "seed1": ""}


def _setting(method: str) -> ReportedMethod:
    return ReportedMethod(method=method, group="", variant="auto", protected=True)


def test_curves_are_averaged_over_policies_then_heads(curves: list[Record]) -> None:
    costs = head_curves(curves, GROUPS)
    heads = costs[_setting("kvp")]
    assert heads[0, 0].cost == pytest.approx((1.0, 0.25, 0.0))
    assert heads[0, 1].cost == pytest.approx((1.0, 0.35, 0.0))
    assert mean_curve(heads).cost == pytest.approx((1.0, 0.3, 0.0))


def test_areas_are_sums_over_heads_against_the_oracle(curves: list[Record]) -> None:
    measured = areas(curves, GROUPS)
    assert measured[_setting("kvp")].ratios == pytest.approx((0.5 / 0.4, 0.7 / 0.4))
    assert measured[_setting("knorm")].ratios == pytest.approx((1.0 / 0.4,))
    assert measured[_setting("knorm")].skill == pytest.approx((0.4 + 0.6) / 2)


def test_without_an_oracle_of_the_same_protection_there_is_no_ratio(curves: list[Record]) -> None:
    unprotected = [
        {**record, "protected": False} for record in curves if record["method"] == "knorm"
    ]
    measured = areas([*curves, *unprotected], GROUPS)
    (setting,) = (setting for setting in measured if not setting.protected)
    assert measured[setting].ratios == ()


def test_figures_show_protected_curves_and_the_best_preset(curves: list[Record]) -> None:
    knorm = [record for record in curves if record["method"] == "knorm"]
    better = [{**record, "variant": "preset", "area": 0.2} for record in knorm]
    unprotected = [{**record, "protected": False, "area": 0.0} for record in knorm]
    records = [*curves, *better, *unprotected]
    shown = shown_curves(head_curves(records, GROUPS), areas(records, GROUPS))
    assert shown["knorm"].protected
    assert shown["knorm"].variant == "preset"
