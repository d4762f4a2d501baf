"""What a comparison says, as text and as pandas tables, for Python, CSV files and papers."""

from __future__ import annotations

import html
import math
from collections.abc import Mapping
from functools import cached_property
from typing import ClassVar

import pandas

from eval.results.closing import closing_text, short_table, title
from eval.results.comparison import Comparison, compare_all
from eval.results.estimates import CellKey, Cells, full_of
from eval.results.folder import Results, load_results
from eval.results.sentences import sentences
from eval.results.stats import Interval, holm
from kvp.errors import warn_caller

OVERALL = "all"
"""`task` of the rows over all usable tasks."""


def tidy(comparison: Comparison) -> pandas.DataFrame:
    """A row per task, method, setting and budget, with the columns of docs/formats.md."""
    usable = comparison.task_sort.usable
    gaps = {key: gap for key, gap in comparison.gaps.items() if key[0] in comparison.choices}
    tested = gaps, comparison.significant
    rows = _task_rows(comparison, OVERALL, comparison.cells, not usable, tested)
    for task, cells in comparison.tasks.items():
        name = f"task {task}" if task == OVERALL else task
        rows += _task_rows(comparison, name, cells, task not in usable)
    return pandas.DataFrame(rows)


TestedGaps = tuple[Mapping[CellKey, Interval], set[CellKey]]
"""Differences, and the keys of those that are significant."""


def _task_rows(
    comparison: Comparison, task: str, cells: Cells, apart: bool, lead: TestedGaps = ({}, set())
) -> list[dict[str, object]]:
    """Rows of one task, or of all usable ones, which alone have differences to the `lead`."""
    full = None if apart or comparison.unfinished else full_of(cells)
    mean = full.interval.mean if full else 0.0
    keys = [key for setting in comparison.settings for key in cells if key[0] == setting]
    others = [key for key in keys if full and cells[key] is not full]
    gaps = {key: gap for key in others if full and (gap := comparison.minus(cells[key], full))}
    minus_full = gaps, holm(gaps)
    rows: list[dict[str, object]] = []
    for key in keys:
        (setting, spec), estimate = key, cells[key]
        row: dict[str, object] = {
            "unfinished": bool(comparison.unfinished),
            "metric": comparison.kind,
            "protocol": comparison.protocol, "task": task, "apart": apart,
            "method": setting.family, "setting": setting.describe(),
            "chosen": setting in comparison.choices, "budget": spec,
            "estimate": estimate.interval.mean, "low": estimate.interval.low,
            "high": estimate.interval.high, "n": estimate.interval.prompts,
            "policies": estimate.policies, "kept_tokens": estimate.kept_tokens,
            "kept_share": estimate.share, "cache_bytes": estimate.nbytes,
            "share_of_full": estimate.interval.mean / mean if mean else math.nan,
        }  # fmt: skip
        row |= _gap_columns("minus_full", key, minus_full)
        rows.append(row | _gap_columns("minus_lead", key, lead))
    return rows


def _gap_columns(name: str, key: CellKey, tested: TestedGaps) -> dict[str, object]:
    gaps, significant = tested
    mean, low, high = gaps[key].numbers if key in gaps else (math.nan,) * 3
    gap: dict[str, object] = {name: mean, f"{name}_low": low, f"{name}_high": high}
    return gap | {f"{name}_differs": key in significant}


class ResultsFrame(pandas.DataFrame):  # type: ignore[misc]  # pandas has no types here
    """The rows of a results folder, one per prompt and setting (docs/formats.md).

    What pandas makes of it, such as a selection, is a plain frame without the methods below.
    """

    _metadata: ClassVar[list[str]] = ["results"]  # pandas adds it to a list
    results: Results

    @classmethod
    def read(cls, folder: str) -> ResultsFrame:
        """Rows of a folder or an address; a UserWarning says what is unfinished."""
        results = load_results(folder)
        frame = cls(list(results.records))
        frame.results = results
        if frame.unfinished:
            warn_caller(frame.unfinished)
        return frame

    @property
    def _constructor(self) -> type[pandas.DataFrame]:
        return pandas.DataFrame  # type: ignore[no-any-return]

    @property
    def unfinished(self) -> str:
        """What the folder lacks, in a sentence; "" where it is complete."""
        return self.results.unfinished

    @cached_property
    def comparisons(self) -> list[Comparison]:
        """Answers, then given replies, protocol by protocol."""
        return compare_all(self.results)

    def sentences(self) -> list[str]:
        """The sentences at the end of kvp eval and at the top of the page of kvp report."""
        lines = (line for comparison in self.comparisons for line in sentences(comparison))
        return list(dict.fromkeys(lines))

    def summary(self) -> pandas.DataFrame:
        """Every estimate with its interval, one number per column (`tidy`)."""
        return pandas.concat(map(tidy, self.comparisons), ignore_index=True)

    def table(self, number: int = 0) -> pandas.DataFrame:
        """Methods by budgets as texts with intervals, for papers.

        Then `.to_latex(escape=True)`, or `.to_markdown()` where tabulate is installed. `number`
        counts `comparisons`. The name of the index says what is unfinished.
        """
        shown = short_table(self.comparisons[number], interval=True, finer=True)
        return shown.rename_axis(index=self.unfinished or "method", columns=None)

    def __repr__(self) -> str:
        rows = f"{len(self)} row{'s' * (len(self) != 1)}"
        size = f"{rows}, {len(self.columns)} columns; every number: .summary()"
        return f"{closing_text(self.comparisons)}\n{size}"

    def _repr_html_(self) -> str:
        parts: list[str] = []
        for comparison in self.comparisons:
            lines = (*sentences(comparison), title(comparison))
            parts += [f"<p>{html.escape(line)}</p>" for line in lines]
            parts += [short_table(comparison).to_html()] if comparison.cells else []
        return "".join(parts)
