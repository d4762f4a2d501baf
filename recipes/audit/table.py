"""The page of an audit, as Markdown: one results folder per attention backend, the main one first.

    python recipes/audit/table.py RUN/sdpa RUN/eager

Question seen and not seen, protected and unprotected each have their tables: scores against the
best null, answers lost, evidence kept in each head (`kvp-report` computes and words them). The last
tables say what another attention backend changes.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path

from eval.report import tables
from eval.report.aggregates import ReportedMethod
from eval.report.comparison import Comparison, compare
from eval.report.failures import Cells, cells_of, evidence_table, failure_table
from eval.report.page import commands
from eval.report.tables import Field, Table, markdown
from eval.results.load import Results, load_results
from eval.results.records import FULL, Record
from eval.results.schema import PROTOCOL_NAMES
from eval.stats import Interval, by_policy, holm, paired_difference

RESAMPLES = 2000
PROTECTED = {True: "protected", False: "unprotected"}


def page(folders: Sequence[Path]) -> Iterator[str]:
    """Parts of the page in order."""
    results = [load_results(folder) for folder in folders]
    lines = [line for each in results for line in commands(each.manifest)]
    yield "\n".join(["```", *dict.fromkeys(lines), "```", ""])
    for protocol in results[0].protocols:
        main = compare(results[0], "accuracy", protocol, resamples=RESAMPLES)
        if main is None:
            continue
        cells = cells_of(results[0], protocol)
        every = tables.lines_of_all(main)
        for protected, word in PROTECTED.items():
            lines_of = [
                line for line in every if line[2].protected == protected or line[2].method == FULL
            ]
            if len(lines_of) > 1:
                yield f"## {PROTOCOL_NAMES[protocol]}; {word}\n"
                yield from _tables(main, cells, lines_of)
        for other in results[1:]:
            what = f"{_backend(other)} instead of {_backend(results[0])}"
            yield f"## {PROTOCOL_NAMES[protocol]}; {what}\n"
            yield markdown(backends(results[0], other, main, every))


def _tables(comparison: Comparison, cells: Cells, lines: Sequence[tables.Line]) -> Iterator[str]:
    yield markdown(tables.some_settings(comparison, lines))
    middle = comparison.budgets.specs[(len(comparison.budgets.specs) - 1) // 2]
    for table in (
        tables.minus_null(comparison, lines),
        failure_table(cells, comparison, lines),
        evidence_table(cells, comparison, middle, lines),
    ):
        if table is not None:
            yield markdown(table)


def backends(
    main: Results, other: Results, comparison: Comparison, lines: Sequence[tables.Line]
) -> Table:
    """What another attention backend changes: points, paired by prompt, and answers that differ."""
    before, after = (cells_of(results, comparison.protocol) for results in (main, other))
    changes: dict[tuple[ReportedMethod, str | None], tuple[Interval, str]] = {}
    for _, _, setting in lines:
        for spec in (None,) if setting.method == FULL else comparison.budgets.specs:
            cells = (side.get(setting, {}).get(spec, ()) for side in (before, after))
            change = _change(*cells)
            if change is not None:
                changes[setting, spec] = change
    resolved = dict(zip(changes, holm([gap for gap, _ in changes.values()]), strict=True))
    rows: list[Sequence[Field | str]] = []
    for name, note, setting in lines:
        keys = [
            (setting, spec)
            for spec in ((None,) if setting.method == FULL else comparison.budgets.specs)
        ]
        fields = [_field(changes.get(key), resolved=resolved.get(key, False)) for key in keys]
        if setting.method == FULL:
            fields *= len(comparison.budgets.specs)
        rows.append([Field(text=name, small=note), *fields])
    return Table(
        caption=f"Points by {_backend(other)} minus points by {_backend(main)} (95 % bootstrap "
        "interval, paired by prompt; answers that are other words); * differs from 0 at 5 % after "
        f"Holm's correction for the {len(changes)} differences of the table.",
        header=("method", *tables.budget_names(comparison.budgets)),
        rows=rows,
    )


def _change(before: Sequence[Record], after: Sequence[Record]) -> tuple[Interval, str] | None:
    """Difference of scores, and answers changed in words; None without a common answer."""
    said = {_answer(record): record["prediction"] for record in before}
    both = [record for record in after if _answer(record) in said]
    if not both:
        return None
    gap = paired_difference(by_policy(after), by_policy(before), resamples=RESAMPLES)
    changed = sum(said[_answer(record)] != record["prediction"] for record in both)
    return gap, f"{changed} of {len(both)} answers"


def _field(change: tuple[Interval, str] | None, *, resolved: bool) -> Field:
    if change is None:
        return Field(text="–")
    gap, words = change
    return Field(
        text=f"{100 * gap.mean:+.1f}{' *' if resolved else ''}",
        small=f"{100 * gap.low:+.1f} to {100 * gap.high:+.1f}\n{words}",
    )


def _answer(record: Record) -> tuple[str, str, str | None]:
    return record["task"], record["example"], record["policy"]


def _backend(results: Results) -> str:
    return str(results.setting("attention") or "sdpa")


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("results", type=Path, nargs="+")
    print("\n".join(page(parser.parse_args().results)))


if __name__ == "__main__":
    main()
