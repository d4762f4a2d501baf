"""The tables and sentences of docs/results/methods.md, from the comparisons of `eval.report`.

Each method stands in the setting that kvp tune chose for it. Intervals and p-values come from
`eval.results.stats`; Holm's correction is for all differences of one table.
"""

from __future__ import annotations

from dataclasses import replace

from eval.report import tables
from eval.report.tables import Table
from eval.results.comparison import Comparison
from eval.results.records import FULL, LEARNED, ORACLE
from policies.registry import NULLS

RESAMPLES = 2000
SHOWN = ("6%", "12.5%", "25%")
"""Budgets of the page; CSV files have all."""
ABOVE = "* above, † below the best null with the same protection, at 5 % after Holm's correction"
SEEN = {"query_aware": "question seen", "query_agnostic": "question not seen"}


def scores(comparison: Comparison) -> Table:
    """Every method in its chosen setting, marked where it differs from the best null."""
    lines = {choice.setting: choice.setting.details for choice in comparison.choices.values()}
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
        f"{family} {_number(comparison, family, spec)}" for family in (ours, other, null) if family
    ]
    if ours is not None and other is not None:
        parts.append(f"{ours} minus {other} {_gap(comparison, ours, other, spec)}")
    parts.append(f"the full cache {_number(comparison, FULL, None)}")
    kind = "answers" if comparison.kind == "accuracy" else "perplexity of dialogues"
    seen = SEEN[comparison.protocol].capitalize()
    return f"{seen}, {kind} with {spec} of the cache: {'; '.join(parts)}."


def _of(comparison: Comparison, spec: str, *methods: str) -> str | None:
    """The best family among methods; with "" among all that are neither trained nor nulls."""
    choices = {
        family: choice for family, choice in comparison.choices.items()
        if not choice.setting.self_sized
        and (choice.setting.method in methods if methods != ("",)
             else choice.setting.method not in (FULL, ORACLE, LEARNED, *NULLS))
    }  # fmt: skip
    means = {
        family: estimate.interval.mean
        for family in choices if (estimate := comparison.estimate(family, spec)) is not None
    }  # fmt: skip
    best = max if comparison.kind == "accuracy" else min
    return best(means, key=lambda family: means[family], default=None)


def _number(comparison: Comparison, family: str, spec: str | None) -> str:
    estimate = comparison.estimate(family, spec)
    if estimate is None:
        return "–"
    if comparison.kind == "accuracy":
        return estimate.interval.text(100, ".1f", " %")
    return estimate.interval.text(1, ".2f")


def _gap(comparison: Comparison, ours: str, theirs: str, spec: str) -> str:
    """The paired difference, + better: points, or nats of likelihood per token."""
    sides = [comparison.estimate(family, spec) for family in (ours, theirs)]
    assert sides[0] is not None, "the best method has an estimate"
    assert sides[1] is not None, "the best method has an estimate"
    answers = comparison.kind == "accuracy"
    gap = comparison.minus(sides[0], sides[1])
    assert gap is not None, "both answered the same prompts"
    if answers:
        return gap.text(100, "+.1f", " points")
    return gap.text(1, "+.3f", " nats per token")
