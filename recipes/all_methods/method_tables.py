"""The tables and sentences of docs/results/methods.md, from the comparisons of `eval.report`.

Each method stands in the setting that kvp tune chose for it. Intervals and p-values come from
`eval.results.stats`; Holm's correction is for all differences of one table.
"""

from __future__ import annotations

from dataclasses import replace

from eval.report import tables
from eval.report.tables import Table
from eval.results.comparison import Comparison, Estimate
from eval.results.records import FULL, LEARNED, ORACLE
from eval.results.settings import MethodSetting
from policies.registry import NULLS

RESAMPLES = 2000
SHOWN = ("6%", "12.5%", "25%")
"""Budgets of the page; CSV files have all."""
ABOVE = "* above, † below the best null with the same protection, at 5 % after Holm's correction"
SEEN = {"query_aware": "question seen", "query_agnostic": "question not seen"}


def scores(comparison: Comparison) -> Table:
    """Every method in its chosen setting, marked where it differs from the best null."""
    lines = {setting: setting.details for setting in comparison.choices}
    table = tables.some_settings(comparison, lines)
    kept = [0] + [i for i, name in enumerate(table.header) if name.split(" ")[0] in SHOWN]
    return replace(
        table,
        caption=f"Answers, %, mean over {len(comparison.sorted.usable)} tasks "
        f"({comparison.interval}); {ABOVE}.",
        header=[table.header[i] for i in kept],
        rows=[[row[i] for i in kept] for row in table.rows],
    )


def sentence(comparison: Comparison, spec: str) -> str:
    """The best policy, the best other method and the best null at a budget, whatever they are.

    The best ones are those of these prompts; each is in the setting chosen on others.
    """
    ours = _of(comparison, spec, LEARNED)
    other, null = _of(comparison, spec, ""), _of(comparison, spec, *NULLS)
    parts = [
        f"{one.family} {_number(comparison, comparison.cells[one, spec])}"
        for one in (ours, other, null) if one
    ]  # fmt: skip
    if ours is not None and other is not None:
        gap = _gap(comparison, ours, other, spec)
        parts.append(f"{ours.family} minus {other.family} {gap}")
    parts.append(f"the full cache {_number(comparison, comparison.full)}")
    kind = "answers" if comparison.kind == "accuracy" else "perplexity of dialogues"
    seen = SEEN[comparison.protocol].capitalize()
    return f"{seen}, {kind} with {spec} of the cache: {'; '.join(parts)}."


def _of(comparison: Comparison, spec: str, *methods: str) -> MethodSetting | None:
    """The best among methods; with "" among all that are neither trained nor nulls."""
    means = {
        setting: comparison.cells[setting, spec].interval.mean * comparison.measure.sign
        for setting in comparison.choices
        if (setting, spec) in comparison.cells
        and (setting.method in methods if methods != ("",)
             else setting.method not in (FULL, ORACLE, LEARNED, *NULLS))
    }  # fmt: skip
    return max(means, key=lambda setting: means[setting], default=None)


def _number(comparison: Comparison, estimate: Estimate | None) -> str:
    if estimate is None:
        return "–"
    unit = " %" if comparison.kind == "accuracy" else ""
    return estimate.interval.text(comparison.measure.scale, comparison.measure.page, unit)


def _gap(comparison: Comparison, ours: MethodSetting, theirs: MethodSetting, spec: str) -> str:
    """The paired difference, + better: points, or nats of likelihood per token."""
    measure = comparison.measure
    gap = comparison.minus(comparison.cells[ours, spec], comparison.cells[theirs, spec])
    assert gap is not None, "both answered the same prompts"
    return gap.text(measure.scale, measure.gap, f" {measure.gap_unit}")
