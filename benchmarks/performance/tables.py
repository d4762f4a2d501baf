"""Rows of the JSON files as tables of the page."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Row = Mapping[str, Any]
Report = Mapping[str, Any]
NONE = "–"


@dataclass(frozen=True, kw_only=True)
class Table:
    """Headings and cells; the first `names` columns are text, the others numbers."""

    headings: Sequence[str]
    rows: Sequence[Sequence[str]]
    names: int = 1

    def markdown(self) -> str:
        """With numbers to the right."""
        marks = ["---" if place < self.names else "--:" for place in range(len(self.headings))]
        lines = [self.headings, *([marks]), *self.rows]
        lead, rule, *rest = lines
        text = [f"| {' | '.join(lead)} |", f"|{'|'.join(rule)}|"]
        return "\n".join(text + [f"| {' | '.join(row)} |" for row in rest])


def number(value: float | None) -> str:
    """Three digits; all digits of larger numbers, in groups."""
    if value is None:
        return NONE
    if abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:#.3g}".rstrip(".")


def milliseconds(seconds: float) -> str:
    """Of seconds."""
    return number(1000 * seconds)


def percent(share: float) -> str:
    """Of a share."""
    return number(100 * share)


def scoring(report: Report) -> list[Table]:
    """Methods of kvp and presses of kvpress side by side, a table for each number of tokens."""
    rows: Sequence[Row] = report["results"]
    clock = "wall_share" if report["settings"].get("device") == "cuda" else "share"
    found = []
    for tokens in dict.fromkeys(row["tokens"] for row in rows):
        here = [row for row in rows if row["tokens"] == tokens]
        presses = {row["method"]: row for row in here if row["source"] == "kvpress"}
        own = [row for row in here if row["source"] == "kvp"]
        ran = [row for row in own if "share" in row]
        headings = [f"{tokens:,} tokens", "kvp, % of the prefill", "whole"]
        other = next((row["environment"] for row in presses.values()), "kvpress")
        headings += [f"{other}, %", "whole", "kvp / kvpress"]
        lines = [_methods(row, presses.get(row["method"]), clock) for row in ran]
        lines += [
            [row["method"], f"not run: {row['skipped']}", *[""] * 4]
            for row in own if "skipped" in row
        ]  # fmt: skip
        found.append(Table(headings=headings, rows=lines))
    return found


def _methods(own: Row, press: Row | None, clock: str) -> list[str]:
    cells = [own["method"], percent(own[clock]), f"{own['whole_share']:.2f}"]
    if press is None:
        return [*cells, NONE, NONE, NONE]
    mark = "†" if press["by_difference"] else ""
    ratio = own[clock] / press[clock] if press[clock] > 0 else None
    return [*cells, percent(press[clock]) + mark, f"{press['whole_share']:.2f}", number(ratio)]


def labels(report: Report) -> list[Table]:
    """Forms beside each other at each length."""
    rows: Sequence[Row] = report["results"]
    forms = list(dict.fromkeys(row["form"] for row in rows))
    headings = ["tokens"]
    for form in forms:
        headings += [f"{form}, processor ms", "wall ms", "memory, MiB", "process, MiB"]
    lines = []
    for length in dict.fromkeys(row["length"] for row in rows):
        cells = [f"{length:,}"]
        for form in forms:
            here = (each for each in rows if (each["length"], each["form"]) == (length, form))
            row = next(here, {"skipped": "not reached"})
            if "skipped" in row:
                cells += [row["skipped"], NONE, NONE, NONE]
                continue
            cells += [milliseconds(row["processor_seconds"]), milliseconds(row["seconds"])]
            cells += [number(row["working_mib"]), number(row["peak_mib"])]
        lines.append(cells)
    return [Table(headings=headings, rows=lines)]


def training(report: Report) -> list[Table]:
    """Objective by number of heads."""
    clock = "seconds" if report["settings"]["device"] == "cuda" else "processor_seconds"
    headings = ["objective", "network", "heads", "processor ms", "wall ms"]
    headings += [f"{'wall' if clock == 'seconds' else 'processor'} ms per head", "GB"]
    lines = [
        [
            row["objective"], row["network"], str(row["heads"]),
            milliseconds(row["processor_seconds"]), milliseconds(row["seconds"]),
            milliseconds(row[clock] / row["heads"]), number(row["peak_gb"]),
        ]
        for row in report["results"]
    ]  # fmt: skip
    return [Table(headings=headings, rows=lines, names=2)]


def decoding(report: Report) -> list[Table]:
    """Caches beside each other."""
    headings = ["model", "tokens", "cache", "ms", "wall ms", "fastest ms", "full over it"]
    lines = [
        [
            row["model"],
            f"{row['tokens']:,}",
            "dense" if row["cache"] == "uniform" else row["cache"].removesuffix(":auto"),
            *map(number, map(row.get, ("milliseconds", "wall_milliseconds", "fastest", "speedup"))),
        ]
        for row in report["results"]
    ]
    return [Table(headings=headings, rows=lines, names=3)]


def collecting(report: Report) -> list[Table]:
    """Ways to run the same prompts, as ratios to transformers alone."""
    rows: Sequence[Row] = report["results"]
    clocks = list(rows[0]["over_bare"]) if rows else []
    headings = ["model", "way", *(clock.replace("_", " ") for clock in clocks), "sequences/s"]
    lines = [
        [row["model"], row["way"], *map(number, [*row["over_bare"].values(), row["per_second"]])]
        for row in rows
    ]
    return [Table(headings=headings, rows=lines, names=2)]


def dry_runs(report: Report) -> list[Table]:
    """Estimates beside what they are of."""
    lines = [
        [row["program"], row["unit"], *map(number, (row["said"], row["took"], row["ratio"]))]
        for row in report["results"]
    ]
    headings = ["program", "unit", "dry run", "run", "run over dry run"]
    return [Table(headings=headings, rows=lines, names=2)]


def tests(report: Report) -> list[Table]:
    """How many passed, and which did not: test functions, with the number of their cases."""
    failed = Counter(test.partition("[")[0] for test in report["failed"])
    rows = [
        [report["results"][0]["outcome"]],
        *([f"{n} of `{test}`"] for test, n in failed.items()),
    ]
    return [Table(headings=["outcome"], rows=rows)]
