"""Each method of a table against the best null with the same protection (`eval.summary`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from eval.report.aggregates import Grid, ReportedMethod
from eval.report.best_settings import Comparison
from eval.report.page import Field
from eval.results.records import FULL
from eval.stats import Interval
from eval.summary import over_null
from policies.registry import NULLS

OverNulls = Mapping[tuple[ReportedMethod, str], tuple[str, Interval]]
"""Setting and budget -> the best null with its protection, and what the setting has over it."""


def over_nulls(
    comparison: Comparison, grid: Grid, lines: Sequence[tuple[str, str, ReportedMethod]]
) -> OverNulls:
    """Differences of the settings of a table (name, note, setting) to nulls.

    Paired by prompt, of scores or of nats per token. Without those of nulls, of the full cache and
    of traces, and where no null was run or it answered other prompts.
    """
    over = {}
    for _, _, setting in lines:
        for spec in comparison.budgets.specs:
            if setting.method not in (FULL, *NULLS) and spec in grid.get(setting, {}):
                found = _over_null(comparison, grid, setting, spec)
                if found is not None:
                    over[setting, spec] = found
    return over


def _over_null(
    comparison: Comparison, grid: Grid, setting: ReportedMethod, spec: str
) -> tuple[str, Interval] | None:
    nulls = {
        null: budgets[spec]
        for null, budgets in grid.items()
        if null.method in NULLS and null.protected == setting.protected and spec in budgets
    }
    sign = 1.0 if comparison.higher_is_better else -1.0
    best = max(nulls, key=lambda null: sign * nulls[null].interval.mean, default=None)
    if best is None:
        return None
    gap = over_null(
        grid[setting][spec].scores,
        nulls[best].scores,
        bounds=(-1, 1) if comparison.kind == "accuracy" else None,
        resamples=comparison.resamples,
        seed=0,
    )
    return None if gap is None else (best.method, gap)


def with_null(
    number: Field, comparison: Comparison, over: tuple[str, Interval] | None, *, resolved: bool
) -> Field:
    """A method's number with its distance to the best null below."""
    if over is None:
        return number
    null, gap = over
    scale, digits = (100, 1) if comparison.kind == "accuracy" else (1, 2)
    mean, low, high = (f"{scale * value:+.{digits}f}" for value in (gap.mean, gap.low, gap.high))
    star = " *" if resolved else ""
    return replace(number, small=f"{number.small}\n{mean}{star} over {null}\n{low} to {high}")


def null_words(comparison: Comparison) -> str:
    """What stands below the intervals, for captions."""
    if comparison.kind == "kept":
        return ""
    if not any(setting.method in NULLS for setting in comparison.grid):
        return "; no null was run (add nulls to --methods of kvp-eval)"
    unit = "points" if comparison.kind == "accuracy" else "nats of likelihood per token"
    return f"; below, {unit} above the best null with the same protection, paired by prompt"
