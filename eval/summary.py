"""What a run shows at its end: a table per comparison, sentences, and needle heat maps as CSV."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Sequence
from io import StringIO
from pathlib import Path
from statistics import fmean

from rich.console import Console
from rich.measure import Measurement
from rich.table import Table

from eval.comparison import (
    PROTECTED,
    Comparison,
    Estimate,
    ReportedMethod,
    budget_order,
    resolved,
    sentences,
)
from eval.records import FULL, LEARNED, SELF_SIZED, Record, method_label
from kvp.artifacts.files import atomic_write_text
from kvp.data.ruler import RULER_13
from kvp.data.tasks import ruler_share
from policies.registry import NULLS

NO_BETTER = "°"
"""Behind a mean that is not shown to be above the best null's."""
SPREAD = "(± half of the 95 % interval)"
"""Shown next to each mean where the screen is wide enough."""
SEVERAL_SEEDS = "kvp: intervals are over prompts and training seeds"
ONE_SEED = "kvp, one training seed: what another seed would change is not in the interval"
WORDS = {"accuracy": "mean score, %", "perplexity": "perplexity of the given text"}
"""What tables are of, by kind of comparison."""


def print_summary(console: Console, comparisons: Sequence[Comparison]) -> None:
    """Print every comparison, at most 100 columns wide, and sentences on the first."""
    for comparison in comparisons:
        _print(console, comparison)
    for line in _legend(comparisons):
        console.print(line)
    for sentence in sentences(comparisons[0]) if comparisons else ():
        console.print(sentence, soft_wrap=True)


def _print(console: Console, comparison: Comparison) -> None:
    table = _table(comparison, spread=True)
    fits = _width(console, table) <= console.width
    what = f"{comparison.protocol}: {WORDS[comparison.kind]}"
    console.print(f"{what}{f' {SPREAD}' * fits}{comparison.left_out}")
    if not fits:
        table = _table(comparison, spread=False)
    console.print(table, width=max(console.width, _width(console, table)), crop=False)


def _width(console: Console, table: Table) -> int:
    """Columns the table takes where nothing limits it."""
    return Measurement.get(console, console.options.update(max_width=10_000), table).maximum


def _table(comparison: Comparison, *, spread: bool) -> Table:
    no_better = not_above_null(comparison)
    grid = comparison.grid
    specs = {spec for budgets in grid.values() for spec in budgets}
    columns = sorted(specs, key=lambda spec: budget_order(spec or FULL))
    table = Table(box=None, pad_edge=False)
    table.add_column("method", no_wrap=True)
    for spec in columns:
        table.add_column(spec or FULL, justify="right", no_wrap=True)
    for setting in comparison.settings:
        cells = [
            _cell(grid[setting][spec], comparison, spec, spread=spread)
            + NO_BETTER * ((setting, spec) in no_better)
            if spec in grid[setting] else ""
            for spec in columns
        ]  # fmt: skip
        table.add_row(setting.label, *cells)
    return table


def _cell(of: Estimate, comparison: Comparison, spec: str | None, *, spread: bool) -> str:
    scale, digits = (100, 0) if comparison.kind == "accuracy" else (1, 2)
    half = (of.interval.high - of.interval.low) / 2 * scale
    around = f" ±{half:.{digits}f}" if spread and half else ""  # of one text there is no interval
    size = f" @{of.share:.0%}" if spec == SELF_SIZED else ""
    return f"{of.interval.mean * scale:.{digits}f}{around}{size}"


def not_above_null(comparison: Comparison) -> set[tuple[ReportedMethod, str | None]]:
    """Settings and budgets whose means are not shown to be above the best null's."""
    over = {
        (setting, spec): gap
        for setting in comparison.settings
        for spec in comparison.grid[setting]
        if (gap := comparison.over_null(setting, spec)) is not None
    }
    return over.keys() - {key for key in resolved(over) if over[key].mean > 0}


def _legend(comparisons: Sequence[Comparison]) -> list[str]:
    """What the marks in the tables mean, and what their numbers are over."""
    settings = {setting for each in comparisons for setting in each.grid}
    policies = {
        of.policies
        for each in comparisons
        for setting, estimates in each.grid.items() if setting.method == LEARNED
        for of in estimates.values()
    }  # fmt: skip
    lines = []
    if any(setting.protected for setting in settings):
        lines.append(f"{PROTECTED.strip()}: first and last tokens are always kept")
    if max(policies, default=0) > 1:
        lines.append(SEVERAL_SEEDS)
    if 1 in policies:
        lines.append(ONE_SEED)
    if nulls := [name for name in NULLS if any(setting.method == name for setting in settings)]:
        lines.append(
            f"{NO_BETTER}: not shown to be better than the best null ({', '.join(nulls)}) with the "
            "same protection (paired by prompt, at 5 %, Holm's correction for the table)"
        )
    if any(setting.self_sized for setting in settings):
        lines.append("own @: the size that the method chose, as a share of the cache")
    for comparison in comparisons:
        tasks = {record["task"] for record in comparison.records}
        if len(tasks & set(RULER_13)) > 1:
            what = WORDS[comparison.kind].removesuffix(", %")
            lines.append(f"{what}: over {ruler_share(tasks)}")
    return list(dict.fromkeys(lines))


MAP_FIELDS = ("task", "protocol", "method", "policy", "protected", "budget_spec")
"""What one heat map is of; `method` is a label such as `snapkv:paper+ada`."""
CELL_FIELDS = ("depth", "prompt_length")
"""Labels of a record that place it in a heat map: percent of the haystack, tokens."""


def write_heatmaps(path: Path, records: Iterable[Record]) -> bool:
    """Write mean scores by depth and length, of every method and budget, a line per cell.

    Records without both labels, and given replies, have no place in one. Nothing is written, and
    the answer False, where none has.
    """
    maps: dict[tuple[object, ...], dict[tuple[float, float], list[float]]] = {}
    for record in records:
        labels = record.get("labels", {})
        if record["score"] is None or not all(name in labels for name in CELL_FIELDS):
            continue
        label = method_label(record["method"], record["variant"], record["allocator"])
        named = {**record, "method": label}
        cells = maps.setdefault(tuple(named[name] for name in MAP_FIELDS), {})
        place = labels["depth"], labels["prompt_length"]
        cells.setdefault(place, []).append(float(record["score"]))
    if not maps:
        return False
    text = StringIO()
    lines = csv.writer(text, lineterminator="\n")
    lines.writerow([*MAP_FIELDS, *CELL_FIELDS, "score", "prompts"])
    for key, cells in maps.items():
        for place, scores in sorted(cells.items()):
            lines.writerow([*key, *place, f"{fmean(scores):.6g}", len(scores)])
    atomic_write_text(path, text.getvalue())
    return True
