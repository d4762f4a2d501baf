"""Each method of a table against the best null with the same protection (`eval.nulls`)."""

from __future__ import annotations

from dataclasses import replace

from eval.report.aggregates import Grid, ReportedMethod
from eval.report.best_settings import Comparison
from eval.report.page import Field
from eval.results.records import FULL
from eval.stats import Interval, paired_difference
from policies.registry import NULLS


def over_null(
    grid: Grid, setting: ReportedMethod, spec: str, *, higher_is_better: bool, resamples: int
) -> tuple[str, Interval] | None:
    """The best null of a budget with the protection of a setting, and what the setting has over it.

    The difference is paired by prompt: of scores, or of nats per token. None for nulls, the full
    cache and traces, and where no null was run or it answered other prompts.
    """
    ours = grid.get(setting, {}).get(spec)
    if ours is None or setting.method in (FULL, *NULLS):
        return None
    nulls = {
        null: budgets[spec]
        for null, budgets in grid.items()
        if null.method in NULLS and null.protected == setting.protected and spec in budgets
    }
    sign = 1.0 if higher_is_better else -1.0
    best = max(nulls, key=lambda null: sign * nulls[null].interval.mean, default=None)
    if best is None or not set(ours.values) & set(nulls[best].values):
        return None
    return best.method, paired_difference(ours.values, nulls[best].values, resamples=resamples)


def with_null(
    number: Field, comparison: Comparison, grid: Grid, setting: ReportedMethod, spec: str
) -> Field:
    """A method's number with its distance to the best null below."""
    found = over_null(
        grid,
        setting,
        spec,
        higher_is_better=comparison.higher_is_better,
        resamples=comparison.resamples,
    )
    if found is None:
        return number
    null, over = found
    scale, digits = (100, 1) if comparison.kind == "accuracy" else (1, 2)
    mean, low, high = (f"{scale * value:+.{digits}f}" for value in (over.mean, over.low, over.high))
    return replace(number, small=f"{number.small}\n{mean} over {null}\n{low} to {high}")


def null_words(comparison: Comparison) -> str:
    """What stands below the intervals, for captions."""
    if comparison.kind == "kept":
        return ""
    if not any(setting.method in NULLS for setting in comparison.grid):
        return "; no null was run (add nulls to --methods of kvp-eval)"
    unit = "points" if comparison.kind == "accuracy" else "nats of likelihood per token"
    return f"; below, {unit} above the best null with the same protection, paired by prompt"
