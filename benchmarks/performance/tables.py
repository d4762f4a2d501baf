"""Rows of the JSON files as tables of the page."""

import itertools
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Row = Mapping[str, Any]
Report = Mapping[str, Any]
NONE = ""


@dataclass(frozen=True, kw_only=True)
class Table:
    """Headings and cells; the first `names` columns are text, the others numbers."""

    headings: Sequence[str]
    rows: Sequence[Sequence[str]]
    names: int = 1
    notes: Sequence[str] = ()
    """Sentences below it on what its numbers do not show."""

    def markdown(self) -> str:
        """The table in Markdown, its numbers to the right."""
        numbers = len(self.headings) - self.names
        head, *rows = (f"| {' | '.join(row)} |" for row in (self.headings, *self.rows))
        return "\n".join([head, f"|{self.names * '---|'}{numbers * '--:|'}", *rows])


def number(value: float | None) -> str:
    """A number in two digits, as many as a single run is sure of; with commas from 1,000 on."""
    if value is None:
        return NONE
    rounded = float(f"{value:.2g}")
    return f"{rounded:,.0f}" if abs(rounded) >= 100 else f"{rounded:#.2g}".rstrip(".")


def milliseconds(seconds: float) -> str:
    """Seconds as milliseconds, in two digits."""
    return number(1000 * seconds)


NULLS = {"random_pinned", "random_per_layer", "ring"}
"""Controls that cost at most what `random` does: they are in the file, but in no table."""


def scoring(report: Report) -> list[Table]:
    """Methods of kvp and presses of kvpress side by side, at each number of tokens."""
    clock, prefill = "share", "prefill_processor_seconds"
    if report["settings"].get("device") == "cuda":
        clock, prefill = "wall_share", "prefill_seconds"
    ran: Sequence[Row] = [
        row for row in report["results"] if "share" in row and row["method"] not in NULLS
    ]
    present = {row["source"] for row in ran}
    sources = [name for name in ("kvp", "kvpress") if name in present]
    columns = list(itertools.product(dict.fromkeys(row["tokens"] for row in ran), sources))
    found = {(row["tokens"], row["source"], row["method"]): row for row in ran}
    alone = {(row["tokens"], row["source"]): milliseconds(row[prefill]) for row in ran}
    lines = [["*prefill alone, ms*", *(alone.get(column, NONE) for column in columns)]]
    lines += [
        [method, *(_share(found.get((*column, method)), clock) for column in columns)]
        for method in dict.fromkeys(row["method"] for row in ran)
    ]
    headings = ["method", *(f"{source}, {tokens:,} tokens" for tokens, source in columns)]
    return [Table(headings=headings, rows=lines)]


def _share(row: Row | None, clock: str) -> str:
    if row is None:
        return NONE
    low, high = (number(100 * row[f"share_{end}"]) for end in ("low", "high"))
    rounds = f" ({low}-{high})" if low != high else ""
    return number(100 * row[clock]) + "†" * row["by_difference"] + rounds


def labels(report: Report) -> list[Table]:
    """Forms beside each other at each length."""
    rows: Sequence[Row] = report["results"]
    clock = _clock(report)
    forms = list(dict.fromkeys(row["form"] for row in rows))
    headings = ["tokens"]
    for form in forms:
        headings += [f"{form}, ms", "MiB"]
    lines = []
    for length in dict.fromkeys(row["length"] for row in rows):
        cells = [f"{length:,}"]
        for form in forms:
            here = (each for each in rows if (each["length"], each["form"]) == (length, form))
            row = next(here, {"skipped": "not reached"})
            if "skipped" in row:
                cells += [row["skipped"].rpartition("more would be ")[2], NONE]
                continue
            cells += [milliseconds(row[clock]), number(row["working_mib"])]
        lines.append(cells)
    return [Table(headings=headings, rows=lines)]


def _clock(report: Report) -> str:
    """Name of the seconds that count: of the wall on a GPU, else of the processor."""
    return "seconds" if report["settings"]["device"] == "cuda" else "processor_seconds"


def training(report: Report) -> list[Table]:
    """Time and memory of each objective and number of heads."""
    clock = _clock(report)
    lines = [
        [row["objective"], str(row["heads"]), milliseconds(row[clock]), number(row["peak_gb"])]
        for row in report["results"]
    ]
    return [Table(headings=["objective", "heads", "ms", "GB"], rows=lines)]


def decoding(report: Report) -> list[Table]:
    """Time of a token with each cache; a row for each model and number of tokens."""
    rows: Sequence[Row] = report["results"]
    caches = list(dict.fromkeys(row["cache"] for row in rows))
    cases: dict[tuple[str, int], dict[str, Row]] = {}
    for row in rows:
        cases.setdefault((row["model"], row["tokens"]), {})[row["cache"]] = row
    lines = [
        [model, f"{tokens:,}", *(number(case.get(cache, {}).get("fastest")) for cache in caches)]
        for (model, tokens), case in cases.items()
    ]
    names = ["dense" if name == "uniform" else name.removesuffix(":auto") for name in caches]
    headings = ["model", "tokens", *names]
    return [Table(headings=headings, rows=lines, notes=[*_falling(cases), *_reordered(cases)])]


def _falling(cases: Mapping[tuple[str, int], Mapping[str, Row]]) -> Iterator[str]:
    """Where the full cache is slower with fewer tokens."""
    for (one, here), (other, there) in itertools.pairwise(cases.items()):
        if one[0] == other[0] and here["full"]["fastest"] > there["full"]["fastest"]:
            yield (
                f"Times at {one[1]:,} tokens are higher than at {other[1]:,}, unexplained; lengths "
                "cannot be compared."
            )


def _reordered(cases: Mapping[tuple[str, int], Mapping[str, Row]]) -> Iterator[str]:
    """Where medians rank the caches otherwise than the fastest tokens do."""
    for (model, tokens), case in cases.items():
        medians = {cache: row["milliseconds"] for cache, row in case.items()}
        if sorted(case, key=medians.get) != sorted(case, key=lambda name: case[name]["fastest"]):
            yield (
                f"Medians of `{model}` at {tokens:,} tokens are "
                f"{', '.join(map(number, medians.values()))} ms, another order: this row ranks "
                "nothing."
            )


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
    """Estimates of dry runs beside what the runs took."""
    lines = [
        [row["program"], row["unit"], *map(number, (row["said"], row["took"], row["ratio"]))]
        for row in report["results"]
    ]
    headings = ["program", "unit", "dry run", "run", "run over dry run"]
    return [Table(headings=headings, rows=lines, names=2)]


def tests(report: Report) -> list[Table]:
    """How many passed; functions that failed, with the number of cases and the file's `note`."""
    told = re.findall(r"(\d+) (passed|failed|errors?)\b", report["results"][0]["outcome"])
    counts = {outcome: int(count) for count, outcome in told}
    rows = [[f"{sum(counts.values()):,}", "run"], [f"{counts.get('passed', 0):,}", "passed"]]
    failed = Counter(test.partition("[")[0] for test in report["failed"])
    notes = report.get("note", {})
    for test, count in sorted(failed.items(), key=lambda item: item[1]):
        why = f" {notes[test]}" if test in notes else ""
        rows.append([f"{count:,}", f"failed{why}: `{test.rpartition('::')[2]}`"])
    return [Table(headings=["tests", "outcome"], rows=rows, names=2)]
