"""From computed numbers to tables, which say what differs from the best null."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from pandas import DataFrame

from eval.report.costs import Timing, count_passes
from eval.results.captions import describe_conditions, describe_intervals, describe_left_out
from eval.results.comparison import Comparison
from eval.results.estimates import Cells
from eval.results.frame import OVERALL
from eval.results.method_setting import IN_WORDS, MethodSetting, are_shares
from eval.results.record_names import SEEN, SELF_SIZED
from eval.results.stats import CONFIDENCE, Interval, holm
from kvp.names import FULL, NULLS

Choices = Mapping[MethodSetting, str]
"""Settings of a table, one per row, and how each was chosen (`choose_settings`)."""
NOTHING = "–"
FEW = 20
"""Most settings that the first table shows; if there are more, it shows the chosen ones."""


@dataclass(frozen=True, kw_only=True)
class Table:
    """A table with a caption; the first cell of each row is its heading.

    Lines of a cell after its first are set smaller: an interval, for instance.
    """

    caption: str
    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    families: Sequence[str] = ()
    """Family of each row, where the reader of the page can choose families."""
    budget: str = ""
    """Budget of the table, where the reader of the page can choose one."""


def markdown(table: Table) -> str:
    """A table as Markdown, its caption as bold text above it."""

    def cell(text: str) -> str:
        first, *small = text.split("\n")
        return f"{first} ({', '.join(small)})" if small else first

    head, *body = [f"| {' | '.join(map(cell, row))} |" for row in (table.header, *table.rows)]
    rule = "|---" + "|--:" * (len(table.header) - 1) + "|"
    return "\n".join([f"**{table.caption}**", "", head, rule, *body, ""])


def choose_rows(comparison: Comparison) -> Choices:
    """Settings of the first table: all if at most `FEW`, else the chosen ones."""
    chosen = comparison.choices
    wanted = comparison.settings if len(comparison.settings) <= FEW else chosen
    return {setting: chosen.get(setting, "") for setting in wanted}


def make_full_table(comparison: Comparison) -> Table:
    """The numbers of all presets and allocators, with and without protection."""
    every = dict.fromkeys(comparison.settings, "")
    return make_score_table(comparison, every, ", every setting of every method")


def make_score_table(comparison: Comparison, choices: Choices, which: str = "") -> Table:
    """The numbers of some settings, marked where they differ from those of the best null.

    With `which`, the words for these settings, the caption is complete, as for a model card.
    """
    cells, specs = comparison.cells, [*comparison.budgets]
    choices = {it: how for it, how in choices.items() if it in comparison.settings}
    kinds = {IN_WORDS[setting.protected] for setting in choices if setting.method != FULL}
    alike = "".join(kinds) if len(kinds) == 1 and not which else ""  # of all rows, said once
    own_size = any(setting.self_sized for setting in comparison.settings)
    over = {
        (setting, spec): gap
        for setting in choices
        for spec in specs
        if not comparison.unfinished and (gap := comparison.over_null(setting, spec)) is not None
    }
    differs = holm(over)

    def number(setting: MethodSetting, spec: str) -> str:
        text = _cell(comparison, cells, setting, spec)
        if (setting, spec) in differs:
            first, *small = text.split("\n")
            return "\n".join([f"{first} {'*' if over[setting, spec].mean > 0 else '†'}", *small])
        if spec == SELF_SIZED and (own := cells.get((setting, spec))):
            text += f"\nat {100 * own.share:.1f} % ({own.kept_tokens:.0f})"
        return text

    columns = [*specs, SELF_SIZED] if own_size else specs  # sizes that methods chose come last
    rows = [
        [_head(setting, how, not alike), *(number(setting, spec) for spec in columns)]
        for setting, how in choices.items()
    ]
    nulls = ""
    if over:
        nulls = f" * above the best null{' with the same protection' if which else ''}, † below it "
        nulls += f"(paired by prompt, Holm's correction for {len(over)} differences)."
    elif not any(setting.method in NULLS for setting in comparison.choices):
        nulls = " No null was run (add nulls to --methods of kvp eval)."
    count = len(comparison.task_sort.usable or comparison.task_sort.tasks)
    tasks = f", mean over {count} tasks" if comparison.kind == "answers" and count > 1 else ""
    measured = f", {SEEN[comparison.protocol]}{f', all methods {alike}' if alike else ''}"
    if which:
        sizes = "; (n): tokens per head" if are_shares(specs) else ""
        measured = f" ({describe_intervals(comparison)})"
        measured += f"{sizes}; {describe_conditions(comparison)}"
    return Table(
        caption=f"{comparison.unfinished} {comparison.measure.title.capitalize()}{tasks}{which}"
        f"{measured}{describe_left_out(comparison)}.{nulls}".lstrip(),
        header=("method", *_headings(comparison), *(["own size"] if own_size else ())),
        rows=rows,
        families=[setting.family for setting in choices],
    )


def make_task_table(comparison: Comparison, spec: str) -> Table:
    """The chosen settings at one budget, a column per task."""
    rows = {}
    for setting, how in comparison.choices.items():
        budget = SELF_SIZED if setting.self_sized else spec
        numbers = [_cell(comparison, cells, setting, budget) for cells in comparison.tasks.values()]
        if {*numbers} != {NOTHING}:
            rows[setting] = [_head(setting, how), *numbers]
    return Table(
        caption=f"{comparison.measure.title.capitalize()}, task by task at {spec}, "
        f"{SEEN[comparison.protocol]}.",
        header=("method", *comparison.tasks),
        rows=[*rows.values()],
        families=[setting.family for setting in rows],
        budget=spec,
    )


def make_difference_tables(comparison: Comparison, numbers: DataFrame) -> Iterator[Table]:
    """Paired differences of the settings shown to the full cache and to the first one of `best`,
    in points or nats of likelihood per token. `numbers` is `eval.results.frame.tidy`.
    """
    if numbers.empty:
        return
    lead = comparison.best.lead.label if comparison.best else ""
    for name, other in (("minus_full", "the full cache"), ("minus_lead", lead)):
        paired = numbers[numbers["task"] == OVERALL].dropna(subset=[name])
        shown = paired[paired["chosen"]].rename(columns={f"{name}_differs": "differs"})
        if shown.empty:
            continue
        form, scale = f"{{:{comparison.measure.gap_format}}}".format, comparison.measure.scale
        columns = (scale * shown[f"{name}{end}"] for end in ("", "_low", "_high"))
        mean, low, high = (column.map(form) for column in columns)
        shown["text"] = mean + shown["differs"].map({True: " *", False: ""}) + "\n" + low
        shown["text"] += " to " + high
        wide = shown.pivot_table(
            "text", ["method", "setting"], "budget", "first", fill_value=NOTHING, sort=False
        ).reindex(columns=[*comparison.budgets], fill_value=NOTHING)
        tests = comparison.test_count if name == "minus_lead" else len(paired)
        yield Table(
            caption=f"Each method minus {other}, {comparison.measure.gap_unit}, "
            f"{SEEN[comparison.protocol]}. * is not 0 (Holm's correction for {tests} differences).",
            header=("method", *_headings(comparison)),
            rows=[["\n".join(filter(None, row[0])), *row[1:]] for row in wide.itertuples()],
            families=[method for method, _ in wide.index],
        )


def make_cost_table(timings: Sequence[Timing]) -> Table:
    """Bytes and seconds of one protocol per method and budget."""

    def text(value: float | None, form: str) -> str:
        return NOTHING if value is None else format(value, form)

    def share(value: float | None) -> str:
        return text(value, ".0%").replace("%", " %")

    rows = [
        {
            "method": _head(timing.setting),
            "tokens per head": "all" if timing.budget is None else f"{timing.budget:.0f}",
            "cache bytes": f"{timing.cache_bytes:,.0f}",
            "bytes / full": text(timing.bytes_to_full, ".3f"),
            "prefill, ms": _interval_texts(timing.prefill, 1000, ".1f"),
            "score and evict, ms": _interval_texts(timing.evict, 1000, ".1f"),
            "of the prefill's seconds": share(getattr(timing.evict_to_prefill, "mean", None)),
            "of its FLOPs": share(timing.flops),
            "readings of the prompt": str(count_passes(timing.setting.method) or NOTHING),
            "decode, ms per token": _interval_texts(timing.decode, 1000, ".2f"),
            "decode / full": _interval_texts(timing.decode_to_full, 1, ".3f"),
        }
        for timing in timings
    ]
    counts = sorted({timing.decode.prompts for timing in timings if timing.decode})
    over, more, names = "", "", [*rows[0]]
    if counts:
        over = f", and milliseconds, median and its {CONFIDENCE} interval over "
        over += f"{'/'.join(map(str, counts))} prompts"
        if not all(timing.decode for timing in timings):
            over += "; seconds are left out where fewer than 6 prompts were timed one by one"
        more = " Methods that record the same (queries, hidden states) share one timed prefill."
    else:
        names = [name for name in names if any(row[name] != NOTHING for row in rows)]
        number = max(timing.prompts for timing in timings)
        more = f" Seconds are left out: {number} prompt{'s were' if number != 1 else ' was'} "
        more += "timed, 6 are the least."
    return Table(
        caption=f"One request at a time: cache bytes after eviction{over}; "
        f"{SEEN[timings[0].protocol]}. Ratios are to the full cache, prompt by prompt.{more}",
        header=names,
        rows=[[row[name] for name in names] for row in rows],
        families=[timing.setting.family for timing in timings],
    )


def _headings(comparison: Comparison) -> list[str]:
    """Budgets as they were written, and their mean sizes."""
    shares = are_shares(comparison.budgets)
    return [f"{spec} ({size:.0f})" if shares else spec for spec, size in comparison.budgets.items()]


def _head(setting: MethodSetting, how: str = "", protection: bool = True) -> str:
    """Heading of a row: the method, its setting, and how that was chosen."""
    small = ", ".join(filter(None, [setting.describe(protection=protection), how]))
    name = "full cache" if setting.method == FULL else setting.family
    return "\n".join(filter(None, [name, small]))


def _cell(comparison: Comparison, cells: Cells, setting: MethodSetting, spec: str) -> str:
    """The estimate of a setting at a budget; the full cache is the same at every one."""
    estimate = cells.get((setting, FULL if setting.method == FULL and spec != SELF_SIZED else spec))
    if estimate is None:
        return NOTHING
    interval, measure = estimate.interval, comparison.measure
    texts = _interval_texts(interval, measure.scale, measure.page_format)
    return texts.split("\n")[0] if interval.low == interval.high else texts


def _interval_texts(interval: Interval | None, scale: float, form: str) -> str:
    if interval is None:
        return NOTHING
    mean, low, high = interval.texts(scale, form)
    return f"{mean}\n{low} to {high}"
