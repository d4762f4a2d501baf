"""The closing table of a run: mean score per method and budget with its interval, per protocol."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

from rich.console import Console
from rich.table import Table

from eval.rows import Row, method_label
from eval.stats import Interval, bootstrap_mean, per_prompt, perplexity
from kvp.budgets import parse_budget

FULL_COLUMN = "full"
PROTECTED = " +p"


@dataclass(frozen=True, kw_only=True)
class Line:
    """One method of one protocol: an estimate per budget."""

    protocol: str
    label: str
    """Method, preset, and `+p` where first and last tokens are always kept."""
    cells: Mapping[str, Interval]
    """By budget spec; `full` for the full cache."""


def headline(rows: Iterable[Row], *, resamples: int = 2000, seed: int = 0) -> list[Line]:
    """Mean string-match score over all generated tasks; policy seeds are averaged per prompt."""

    def score(group: list[Row]) -> Interval:
        return bootstrap_mean(per_prompt(group), resamples=resamples, seed=seed)

    return _lines((row for row in rows if row["score"] is not None), score)


def perplexity_headline(rows: Iterable[Row], *, resamples: int = 2000, seed: int = 0) -> list[Line]:
    """Perplexity of the given replies over all dialogue tasks."""

    def score(group: list[Row]) -> Interval:
        return perplexity(group, resamples=resamples, seed=seed)

    return _lines((row for row in rows if row["nll"] is not None), score)


def print_headline(console: Console, rows: Iterable[Row], *, resamples: int, seed: int) -> None:
    """Print what was measured, at most 100 columns wide."""
    rows = list(rows)
    scores = headline(rows, resamples=resamples, seed=seed)
    losses = perplexity_headline(rows, resamples=resamples, seed=seed)
    _print(console, scores, "mean score, % (± half of the 95 % interval)", 100)
    _print(console, losses, "perplexity of the reply (± half of the 95 % interval)", 1)


def row_label(row: Mapping[str, Any]) -> str:
    """What a row's method is called in tables, policies of one method together."""
    return f"{method_label(row['method'], row['variant'])}{PROTECTED if row['protected'] else ''}"


def _lines(rows: Iterable[Row], score: Callable[[list[Row]], Interval]) -> list[Line]:
    groups: dict[tuple[str, str], dict[str, list[Row]]] = {}
    for row in rows:
        cells = groups.setdefault((row["protocol"], row_label(row)), {})
        cells.setdefault(row["budget_spec"] or FULL_COLUMN, []).append(row)
    methods = list(dict.fromkeys(label.removesuffix(PROTECTED) for _, label in groups))

    def place(key: tuple[str, str]) -> tuple[int, bool]:
        return methods.index(key[1].removesuffix(PROTECTED)), key[1].endswith(PROTECTED)

    return [
        Line(
            protocol=key[0],
            label=key[1],
            cells={budget: score(group) for budget, group in groups[key].items()},
        )
        for key in sorted(groups, key=place)
    ]


def _print(console: Console, lines: list[Line], what: str, scale: int) -> None:
    for protocol in dict.fromkeys(line.protocol for line in lines):
        own = [line for line in lines if line.protocol == protocol]
        columns = sorted({budget for line in own for budget in line.cells}, key=_size)
        console.print(f"{protocol}: {what}")
        table = Table(box=None, pad_edge=False)
        table.add_column("method", no_wrap=True)
        for budget in columns:
            table.add_column(budget, justify="right", no_wrap=True)
        for line in own:
            table.add_row(line.label, *(_cell(line.cells.get(name), scale) for name in columns))
        console.print(table)
    if lines:
        console.print("+p: first and last tokens are always kept")


def _size(column: str) -> tuple[bool, bool, Decimal]:
    """Shares first, then token counts, each ascending; the full cache last."""
    if column == FULL_COLUMN:
        return True, True, Decimal(0)
    budget = parse_budget(column)
    return False, budget.percent is None, budget.percent or Decimal(budget.count or 0)


def _cell(value: Interval | None, scale: int) -> str:
    if value is None:
        return ""
    spread = (value.high - value.low) / 2 * scale
    digits = 0 if scale == 100 else 2
    return f"{value.mean * scale:.{digits}f} ±{spread:.{digits}f}"
