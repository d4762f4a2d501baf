"""What kvp eval prints when it ends: sentences, and tables as text."""

from collections.abc import Sequence

import pandas

from eval.results.captions import describe_intervals, describe_left_out
from eval.results.comparison import Comparison
from eval.results.record_names import SELF_SIZED
from eval.results.sentences import KEPT, sentences
from eval.results.stats import CONFIDENCE
from kvp.names import FULL


def closing_text(comparisons: Sequence[Comparison], width: int = 100) -> str:
    """All comparisons, `width` columns wide: sentences and a table for each, then a legend."""
    lines: list[str] = []
    for comparison in comparisons:
        lines += [line for line in sentences(comparison) if line not in lines]
        lines.append(f"{title(comparison)} ({CONFIDENCE} interval)")
        if comparison.cells:
            lines.append(short_table(comparison, interval=True).to_string(line_width=width))
    lines += dict.fromkeys(map(describe_intervals, comparisons))
    if any(it.protects for it in comparisons) and not any(KEPT in line for line in lines):
        lines.append(KEPT)
    if any(setting.self_sized for comparison in comparisons for setting in comparison.settings):
        lines.append("own @: the size that the method chose, as a share of the cache")
    return "\n".join(lines)


def title(comparison: Comparison) -> str:
    """Protocol and measure of a table, and the methods that it leaves out."""
    return f"{comparison.protocol}: {comparison.measure.title}{describe_left_out(comparison)}"


def short_table(
    comparison: Comparison, *, interval: bool = False, finer: bool = False
) -> pandas.DataFrame:
    """Settings by budgets, as texts: the mean, with its `interval`; `finer`: one digit more."""
    measure = comparison.measure
    run = {spec for _, spec in comparison.cells}
    specs = [spec for spec in (*comparison.budgets, SELF_SIZED, FULL) if spec in run]
    labels = dict.fromkeys(setting.label for setting in comparison.settings)
    table = pandas.DataFrame("", list(labels), pandas.Index(specs, name="method"))
    for (setting, spec), estimate in comparison.cells.items():
        mean, low, high = estimate.interval.texts(measure.scale, f".{measure.digits + finer}f")
        around = f" ({low}-{high})" if interval and low != high else ""  # a single text has none
        size = f" @{estimate.share:.0%}" if spec == SELF_SIZED else ""
        table.loc[setting.label, spec] = f"{mean}{around}{size}"
    return table
