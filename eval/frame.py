"""What a comparison says, as text and as pandas tables: with its sentences, or a number a column.

`kvp.evaluate` and `kvp.read_results` give a `ResultsFrame`, `kvp.compare` the differences of two;
`tidy` is behind the CSV files and tables for papers.
"""

from __future__ import annotations

import html
import math
import warnings
from collections.abc import Sequence
from functools import cached_property
from typing import ClassVar

import pandas

from eval.comparison import (
    PICKED,
    PROTECTED,
    Comparison,
    ReportedMethod,
    best_of,
    budget_order,
    compare_all,
    resolved,
    sentences,
)
from eval.records import FULL, SELF_SIZED, results_folder
from eval.results import Results, load_results, unfinished
from eval.stats import Interval

OVERALL = "all"
"""`task` of the rows over all usable tasks."""


def summary(comparisons: Sequence[Comparison], width: int = 100) -> str:
    """All comparisons, `width` columns wide: what is said of each and its table; then a legend."""
    lines: list[str] = []
    for comparison in comparisons:
        lines += [each for each in sentences(comparison) if each not in lines]
        lines.append(f"{title(comparison)} (95 % interval)")
        lines.append(short_table(comparison, interval=True).to_string(line_width=width))
    return "\n".join([*lines, *_legend(comparisons)])


def title(comparison: Comparison) -> str:
    """What a table is of, and what it leaves out."""
    return f"{comparison.protocol}: {comparison.measure}{comparison.left_out}"


def short_table(
    comparison: Comparison, *, interval: bool = False, finer: bool = False
) -> pandas.DataFrame:
    """Settings by budgets, as texts: the mean, with its `interval`; `finer`: one digit more."""
    scale, digits = comparison.scale, finer + (0 if comparison.kind == "accuracy" else 2)

    def cell(setting: ReportedMethod, spec: str | None) -> str:
        of = comparison.grid[setting].get(spec)
        if of is None:
            return ""
        mean, low, high = (f"{scale * each:.{digits}f}" for each in of.interval.numbers)
        around = f" ({low}-{high})" * (interval and low != high)  # of one text there is none
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
    if any(map(best_of, comparisons)):
        lines.append(PICKED)
    if any(setting.protected for setting in settings):
        lines.append(f"{PROTECTED.strip()}: first and last tokens are always kept")
    if any(setting.self_sized for setting in settings):
        lines.append("own @: the size that the method chose, as a share of the cache")
    return list(dict.fromkeys(lines))


def tidy(comparison: Comparison) -> pandas.DataFrame:
    """A row per task, method, setting and budget; answers from 0 to 1, perplexities as they are.

    Columns: unfinished (whether the folder is; then there are no differences), metric, protocol,
    task (`OVERALL`: over the usable ones; one that is called so is `task all`), apart (whether it
    is set apart; then nothing is a ratio to the full cache), method, setting, chosen (whether it is
    the setting shown), budget, estimate, low, high, n (prompts), policies, kept_tokens, kept_share,
    cache_bytes, share_of_full (of its answers, or times its perplexity), and the paired differences
    minus_full and minus_lead (to the method that `sentences` are about, over all tasks and chosen
    settings), in shares of answers or nats per token, more is better, each with _low, _high and
    _differs (`eval.stats.holm`; of the lead `Comparison.told`). By task for the chosen settings
    alone.
    """
    chosen = {choice.setting for choice in comparison.choices.values()}
    usable, best = comparison.sorted.usable, best_of(comparison)
    rows: list[dict[str, object]] = []
    tasks = {f"task {name}" if name == OVERALL else name: name for name in comparison.tasks}
    grids = {name: comparison.tasks[own] for name, own in tasks.items()}
    for task, grid in {OVERALL: comparison.grid, **grids}.items():
        cells = {
            (setting, spec): of
            for setting in comparison.settings if task == OVERALL or setting in chosen
            for spec, of in grid.get(setting, {}).items()
        }  # fmt: skip
        full = next((of for (each, _), of in cells.items() if each.method == FULL), None)
        apart = not usable if task == OVERALL else tasks[task] not in usable
        whole = None if apart or comparison.unfinished else full
        mean = whole.interval.mean if whole else 0.0
        gaps: dict[str, dict[int, Interval]] = {"minus_full": {}, "minus_lead": {}}
        for (setting, spec), of in cells.items():
            shown, key = task == OVERALL and setting in chosen, (setting, spec or FULL)
            lead = grid.get(best.settings[0], {}).get(spec) if best and shown else None
            row: dict[str, object] = {
                "unfinished": bool(comparison.unfinished),
                "metric": "answers" if comparison.kind == "accuracy" else comparison.kind,
                "protocol": comparison.protocol, "task": task, "apart": apart,
                "method": setting.family, "setting": setting.details, "chosen": setting in chosen,
                "budget": spec or FULL, "estimate": of.interval.mean, "low": of.interval.low,
                "high": of.interval.high, "n": of.interval.prompts, "policies": of.policies,
                "kept_tokens": of.kept_tokens, "kept_share": of.share, "cache_bytes": of.nbytes,
                "share_of_full": of.interval.mean / mean if mean else math.nan,
            }  # fmt: skip
            for name, other in (("minus_full", whole), ("minus_lead", lead)):
                told = name == "minus_lead" and task == OVERALL  # by the test of the sentences
                gap = None
                if other is not None and other is not of:
                    gap = comparison.gaps.get(key) if told else comparison.minus(of, other)
                numbers = (math.nan,) * 3 if gap is None else gap.numbers
                row |= zip((name, f"{name}_low", f"{name}_high"), numbers, strict=True)
                row[f"{name}_differs"] = told and key in comparison.told
                if gap is not None and not told:
                    gaps[name][len(rows)] = gap
            rows.append(row)
        for name, found in gaps.items():
            for number in resolved(found):
                rows[number][f"{name}_differs"] = True
    return pandas.DataFrame(rows)


class ResultsFrame(pandas.DataFrame):  # type: ignore[misc]  # pandas has no types here
    """The rows of a results folder, one per prompt and setting (docs/formats.md).

    What pandas makes of it, such as a selection, is a plain frame without the methods below.
    """

    _metadata: ClassVar[list[str]] = ["results", "bootstrap"]  # pandas adds it to a list
    results: Results
    bootstrap: int

    @classmethod
    def read(cls, folder: str, bootstrap: int) -> ResultsFrame:
        """Rows of a folder or an address; a UserWarning says what is unfinished."""
        results = load_results(results_folder(folder))
        frame = cls(list(results.records))
        frame.results, frame.bootstrap = results, bootstrap
        if frame.unfinished:
            warnings.warn(frame.unfinished, stacklevel=3)
        return frame

    @property
    def _constructor(self) -> type[pandas.DataFrame]:
        return pandas.DataFrame  # type: ignore[no-any-return]

    @property
    def unfinished(self) -> str:
        """What the folder lacks of what was begun, in a sentence; "" where it is whole."""
        return unfinished(self.results)

    @cached_property
    def comparisons(self) -> list[Comparison]:
        """Answers, then given replies, protocol by protocol."""
        return compare_all(self.results, resamples=self.bootstrap)

    def sentences(self) -> list[str]:
        """What kvp-eval says at its end, and kvp-report at its beginning."""
        said = (each for comparison in self.comparisons for each in sentences(comparison))
        return list(dict.fromkeys(said))

    def summary(self) -> pandas.DataFrame:
        """Every estimate with its interval, one number per column (`tidy`)."""
        return pandas.concat(map(tidy, self.comparisons), ignore_index=True)

    def table(self, number: int = 0) -> pandas.DataFrame:
        """Methods by budgets as texts with intervals, for papers.

        Then `.to_latex(escape=True)`, or `.to_markdown()` where tabulate is installed. `number` is
        that of the comparison. The name of the index says what is unfinished.
        """
        shown = short_table(self.comparisons[number], interval=True, finer=True)
        return shown.rename_axis(index=self.unfinished or "method", columns=None)

    def __repr__(self) -> str:
        """What kvp-eval prints at its end."""
        size = f"{len(self)} rows, {len(self.columns)} columns; every number: .summary()"
        return f"{summary(self.comparisons)}\n{size}"

    def _repr_html_(self) -> str:
        return "".join(
            "".join(f"<p>{html.escape(line)}</p>" for line in (*sentences(each), title(each)))
            + short_table(each).to_html()
            for each in self.comparisons
        )
