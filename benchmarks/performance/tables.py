"""Rows of the JSON files as tables of the page."""

import itertools
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from benchmarks.markdown import Table

Row = Mapping[str, Any]
Report = Mapping[str, Any]
NONE = ""
NAMES = {
    "small": "four layers",
    "wide": "two layers",
    "smollm2-135m-instruct": "SmolLM2-135M",
    "qwen2.5-7b": "Qwen2.5-7B",
    "full": "full cache",
    "uniform": "equal counts",
    "ragged:auto": "shared budget",
    "ragged:torch": "shared budget without Triton",
    "bare": "transformers alone",
    "collect": "`kvp collect`",
    "one": "the same, one by one",
}
"""What the page calls models, caches and ways to collect."""


def number(value: float | None) -> str:
    """A number in two digits, as many as a single run is sure of; with commas from 1,000 on."""
    if value is None:
        return NONE
    rounded = float(f"{value:.2g}")
    return f"{rounded:,.0f}" if abs(rounded) >= 100 else f"{rounded:#.2g}".rstrip(".")


def name_of(key: str) -> str:
    """What the page calls a model, cache or way to collect."""
    return NAMES.get(key, key)


def milliseconds(seconds: float) -> str:
    """Seconds as milliseconds, in two digits."""
    return number(1000 * seconds)


NULLS = {"random_pinned", "random_per_layer", "ring"}
"""Controls that cost at most what `random` does: they are in the file, but in no table."""

UNEVEN = 5
"""Where rounds of one method differ by this factor, a length has no column."""


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
    uneven = {row["tokens"] for row in ran if row["share_high"] > UNEVEN * row["share_low"]}
    steady = dict.fromkeys(row["tokens"] for row in ran if row["tokens"] not in uneven)
    columns = list(itertools.product(steady, sources))
    found = {(row["tokens"], row["source"], row["method"]): row for row in ran}
    alone = {(row["tokens"], row["source"]): milliseconds(row[prefill]) for row in ran}
    lines = [["*prefill alone, ms*", *(alone.get(column, NONE) for column in columns)]]
    lines += [
        [method.removesuffix(":kvpress")]
        + [_share(found.get((*column, method)), clock) for column in columns]
        for method in dict.fromkeys(row["method"] for row in ran)
    ]
    notes = [f"Rounds at {tokens:,} tokens differ by {UNEVEN} times or more: no column."
             for tokens in sorted(uneven)]  # fmt: skip
    if any(row["by_difference"] for row in ran):
        notes.append("H2O of kvpress is the difference of two prefills.")
    headings = ["method", *(f"{source}, {tokens:,} tokens" for tokens, source in columns)]
    return [Table(headings=headings, rows=lines, notes=notes)]


def _share(row: Row | None, clock: str) -> str:
    return NONE if row is None else number(100 * row[clock])


def labels(report: Report) -> list[Table]:
    """Forms beside each other at each length."""
    rows: Sequence[Row] = report["results"]
    clock = _clock(report)
    forms = list(dict.fromkeys(row["form"] for row in rows))
    headings = ["tokens", *(f"{form}, {unit}" for form in forms for unit in ("ms", "MiB"))]
    found = {(row["length"], row["form"]): row for row in rows}
    lines, ended = [], dict[tuple[str, bool], str]()
    for length in dict.fromkeys(row["length"] for row in rows):
        cells = [f"{length:,}"]
        for form in forms:
            row = found.get((length, form), {"skipped": "not reached"})
            if "skipped" in row:
                why = row["skipped"].rpartition("more would be ")[2]
                note = f"*{form}* was not run from {length:,} tokens on: {why}."
                ended.setdefault((form, why == "not reached"), note)
                cells += [NONE, NONE]
            else:
                cells += [milliseconds(row[clock]), number(row["working_mib"])]
        lines += [cells] if any(cells[1:]) else []
    return [Table(headings=headings, rows=lines, notes=list(ended.values()))]


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
    every: dict[tuple[str, int], dict[str, Row]] = {}
    for row in rows:
        every.setdefault((row["model"], row["tokens"]), {})[row["cache"]] = row
    cases = {key: case for key, case in every.items() if _ranks(case)}
    lines = [
        [name_of(model), f"{tokens:,}"]
        + [number(case.get(cache, {}).get("fastest")) for cache in caches]
        for (model, tokens), case in cases.items()
    ]
    headings = ["model", "tokens", *map(name_of, caches)]
    return [Table(headings=headings, rows=lines, notes=list(_falling(cases)))]


def _ranks(case: Mapping[str, Row]) -> bool:
    """Whether medians rank the caches as the fastest tokens do."""
    medians = sorted(case, key=lambda cache: case[cache]["milliseconds"])
    return medians == sorted(case, key=lambda cache: case[cache]["fastest"])


def _falling(cases: Mapping[tuple[str, int], Mapping[str, Row]]) -> Iterator[str]:
    """Where the full cache is slower with fewer tokens."""
    for (one, here), (other, there) in itertools.pairwise(cases.items()):
        if one[0] == other[0] and here["full"]["fastest"] > there["full"]["fastest"]:
            yield (
                f"Compare caches, not lengths: why all take longer at {one[1]:,} tokens than at "
                f"{other[1]:,} is not known."
            )


def collecting(report: Report) -> list[Table]:
    """Ways to run the same prompts, as ratios to transformers alone."""
    rows: Sequence[Row] = report["results"]
    clocks = ["wall", "processor"]
    lines = [
        [name_of(row["model"]), name_of(row["way"])]
        + [number(value) for value in (*map(row["over_bare"].get, clocks), row["per_second"])]
        for row in rows
    ]
    return [Table(headings=["model", "way", *clocks, "sequences/s"], rows=lines, names=2)]


def dry_runs(report: Report) -> list[Table]:
    """Estimates of dry runs beside what the runs took."""
    lines = [
        [row["program"], row["unit"], *map(number, (row["said"], row["took"]))]
        for row in report["results"]
    ]
    return [Table(headings=["program", "unit", "dry run", "run"], rows=lines, names=2)]


def tests(report: Report) -> list[Table]:
    """How many passed; functions that failed, with the number of cases and the file's `note`."""
    told = re.findall(r"(\d+) (passed|failed|errors?)\b", report["results"][0]["outcome"])
    counts = {outcome: int(count) for count, outcome in told}
    rows = [[f"{counts.get('passed', 0):,}", "passed"]]
    failed = Counter(test.partition("[")[0] for test in report["failed"])
    notes = report.get("note", {})
    for test, count in sorted(failed.items(), key=lambda item: item[1]):
        why = f" {notes[test]}" if test in notes else ""
        rows.append([f"{count:,}", f"failed{why}: `{test.rpartition('::')[2]}`"])
    return [Table(headings=["tests", "outcome"], rows=rows, names=2)]
