"""What a run shows at its end: a table per comparison, and sentences."""

from __future__ import annotations

from collections.abc import Sequence

import pandas
from rich.console import Console

from eval.comparison import (
    PROTECTED,
    Comparison,
    ReportedMethod,
    budget_order,
    sentences,
)
from eval.records import FULL, SELF_SIZED
from kvp.data.ruler import RULER_13
from kvp.data.tasks import ruler_share

SPREAD = "(± half of the 95 % interval)"
"""Shown next to each mean where the screen is wide enough."""
WORDS = {"accuracy": "mean score, %", "perplexity": "perplexity of the given text"}
"""What tables are of, by kind of comparison."""


def print_summary(console: Console, comparisons: Sequence[Comparison]) -> None:
    """Print every comparison, at most 100 columns wide, and sentences on the first.

    That it is unfinished is the first line, and what is set apart stands above each table.
    """
    said = sentences(comparisons[0]) if comparisons else []
    if comparisons and comparisons[0].unfinished:
        console.print(said.pop(0), soft_wrap=True)
    for comparison in comparisons:
        if comparison.sorted.apart:
            console.print(comparison.sorted.apart, soft_wrap=True)
        text = short_table(comparison, spread=True).to_string()
        fits = len(text.partition("\n")[0]) <= console.width
        console.print(f"{title(comparison)}{f' {SPREAD}' * fits}")
        text = text if fits else short_table(comparison).to_string()
        console.print(text, soft_wrap=True)
    for line in (*_legend(comparisons), *said):
        if not comparisons or line != comparisons[0].sorted.apart:
            console.print(line, soft_wrap=True)


def title(comparison: Comparison) -> str:
    """What a table is of, and what it leaves out."""
    return f"{comparison.protocol}: {WORDS[comparison.kind]}{comparison.left_out}"


def short_table(
    comparison: Comparison, *, spread: bool = False, interval: bool = False
) -> pandas.DataFrame:
    """Settings by budgets, as texts: the mean, with ± half of the interval, or the interval."""
    scale, digits = (100, 0) if comparison.kind == "accuracy" else (1, 2)

    def cell(setting: ReportedMethod, spec: str | None) -> str:
        of = comparison.grid[setting].get(spec)
        if of is None:
            return ""
        mean, low, high = (f"{scale * each:.{digits + interval}f}" for each in of.interval.numbers)
        half = (of.interval.high - of.interval.low) / 2 * scale
        around = f" ±{half:.{digits}f}" if spread and half else ""
        around = f" ({low} to {high})" if interval and half else around  # of one text there is none
        size = f" @{of.share:.0%}" if spec == SELF_SIZED else ""
        return f"{mean}{around}{size}"

    specs = {spec for budgets in comparison.grid.values() for spec in budgets}
    columns = sorted(specs, key=lambda spec: budget_order(spec or FULL))
    rows = {each.label: [cell(each, spec) for spec in columns] for each in comparison.settings}
    names = pandas.Index([spec or FULL for spec in columns], name="method")
    return pandas.DataFrame.from_dict(rows, orient="index", columns=names)


def _legend(comparisons: Sequence[Comparison]) -> list[str]:
    """What the numbers in the tables are over."""
    settings = {setting for each in comparisons for setting in each.grid}
    lines = [each.interval for each in comparisons]
    if any(setting.protected for setting in settings):
        lines.append(f"{PROTECTED.strip()}: first and last tokens are always kept")
    if any(setting.self_sized for setting in settings):
        lines.append("own @: the size that the method chose, as a share of the cache")
    for comparison in comparisons:
        tasks = comparison.sorted.usable
        if len({*tasks} & {*RULER_13}) > 1:
            what = WORDS[comparison.kind].removesuffix(", %")
            lines.append(f"{what}: over {ruler_share(tasks)}")
    return list(dict.fromkeys(lines))
