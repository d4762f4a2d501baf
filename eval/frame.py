"""Results as pandas tables: the rows of a folder with its message, and every number in one column.

`kvp.evaluate` and `kvp.read_results` give a `ResultsFrame`, `kvp.compare` the differences of two;
`tidy` is behind the CSV files and tables for papers.
"""

from __future__ import annotations

import html
import math
import warnings
from functools import cached_property

import pandas

from eval.comparison import Comparison, best_of, compare_all, resolved, sentences
from eval.records import FULL, results_folder
from eval.results import Results, load_results, unfinished
from eval.stats import Interval
from eval.summary import short_table, title

OVERALL = "all"
"""`task` of the rows over all usable tasks."""


def tidy(comparison: Comparison) -> pandas.DataFrame:
    """A row per task, method, setting and budget; answers from 0 to 1, perplexities as they are.

    Columns: unfinished (whether the folder is; then there are no differences), metric, protocol,
    task (`OVERALL`: over the usable ones), apart (whether it is set apart; then nothing is a ratio
    to the full cache), method, setting, chosen (whether it is the setting shown), budget, estimate,
    low, high, n (prompts), policies, kept_tokens, kept_share, cache_bytes, share_of_full (of its
    answers, or times its perplexity), and the paired differences minus_full and minus_lead (to the
    method that `sentences` are about, over all tasks and chosen settings), in shares of answers or
    nats per token, more is better, each with _low, _high and _differs (`eval.stats.holm`). By task
    for the chosen settings alone.
    """
    chosen = {choice.setting for choice in comparison.choices.values()}
    usable, best = comparison.sorted.usable, best_of(comparison)
    rows = []
    for task, grid in {OVERALL: comparison.grid, **comparison.tasks}.items():
        cells = {
            (setting, spec): of
            for setting in comparison.settings if task == OVERALL or setting in chosen
            for spec, of in grid.get(setting, {}).items()
        }  # fmt: skip
        full = next((of for (each, _), of in cells.items() if each.method == FULL), None)
        apart = not usable if task == OVERALL else task not in usable
        whole = None if apart or comparison.unfinished else full
        mean = whole.interval.mean if whole else 0.0
        gaps: dict[str, dict[object, Interval]] = {"minus_full": {}, "minus_lead": {}}
        for (setting, spec), of in cells.items():
            shown = task == OVERALL and setting in chosen
            lead = grid.get(best.settings[0], {}).get(spec) if best and shown else None
            for name, other in (("minus_full", whole), ("minus_lead", lead)):
                gap = None if other is None or other is of else comparison.minus(of, other)
                if gap is not None:
                    gaps[name][setting, spec] = gap
        differ = {name: resolved(found) for name, found in gaps.items()}
        for (setting, spec), of in cells.items():
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
            for name, found in gaps.items():
                gap = found.get((setting, spec))
                for part, field in (("", "mean"), ("_low", "low"), ("_high", "high")):
                    row[name + part] = getattr(gap, field, math.nan)
                row[f"{name}_differs"] = (setting, spec) in differ[name]
            rows.append(row)
    return pandas.DataFrame(rows)


class ResultsFrame(pandas.DataFrame):  # type: ignore[misc]  # pandas has no types here
    """The rows of a results folder, one per prompt and setting (docs/formats.md).

    What pandas makes of it, such as a selection, is a plain frame without the methods below.
    """

    _metadata = ("results", "bootstrap")
    results: Results
    bootstrap: int

    @classmethod
    def of(cls, results: Results, bootstrap: int = 2000) -> ResultsFrame:
        """Rows of a folder; a UserWarning says what is unfinished."""
        frame = cls(list(results.records))
        frame.results, frame.bootstrap = results, bootstrap
        if frame.unfinished:
            warnings.warn(frame.unfinished, stacklevel=4)
        return frame

    @classmethod
    def read(cls, folder: str, bootstrap: int) -> ResultsFrame:
        """Rows of a folder or an address."""
        return cls.of(load_results(results_folder(folder)), bootstrap)

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
        return sentences(self.comparisons[0])

    def summary(self) -> pandas.DataFrame:
        """Every estimate with its interval, one number per column (`tidy`)."""
        return pandas.concat(map(tidy, self.comparisons), ignore_index=True)

    def table(self, number: int = 0) -> pandas.DataFrame:
        """Methods by budgets as texts with intervals, for papers.

        Then `.to_latex(escape=True)`, or `.to_markdown()` where tabulate is installed. `number` is
        that of the comparison. The name of the index says what is unfinished.
        """
        shown = short_table(self.comparisons[number], interval=True)
        return shown.rename_axis(index=self.unfinished or "method", columns=None)

    def __repr__(self) -> str:
        """The message, then the tables that kvp-eval prints."""
        parts = [f"{title(each)}\n{short_table(each).to_string()}" for each in self.comparisons]
        size = f"{len(self)} rows, {len(self.columns)} columns; every number: .summary()"
        return "\n".join([*self.sentences(), *parts, size])

    def _repr_html_(self) -> str:
        said = "".join(f"<p>{html.escape(each)}</p>" for each in self.sentences())
        parts = [
            f"<p>{html.escape(title(each))}</p>{short_table(each).to_html()}"
            for each in self.comparisons
        ]
        return said + "".join(parts)
