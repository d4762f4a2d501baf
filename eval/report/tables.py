"""From computed numbers to tables. No number is computed here but differences and rounding."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from pandas import DataFrame

from eval.report.costs import Timing, passes
from eval.results.comparison import Budgets, Comparison, Estimate, ReportedMethod, resolved_keys
from eval.results.frame import OVERALL
from eval.results.records import FULL, LEARNED, ORACLE, SEEN, SELF_SIZED
from eval.results.stats import Interval
from policies.registry import NULLS

Notes = Mapping[ReportedMethod, str]
"""Settings of a table, a line each, and the note below their names."""


@dataclass(frozen=True, kw_only=True)
class Field:
    """One field of a table."""

    text: str
    small: str = ""
    """Smaller lines below: an interval, for instance."""
    mark: str = ""
    """CSS class: `learned`, `reference`, or none."""
    method: str = ""
    """Of the heading of a row: the family that it is about, where the page can choose some."""


NOTHING = Field(text="–")
FEW = 20
"""Settings that the first table has at most; of more, those that were chosen."""


@dataclass(frozen=True, kw_only=True)
class Table:
    """A table with a caption; the first field of each row is its heading."""

    caption: str
    header: Sequence[str]
    rows: Sequence[Sequence[Field | str]]
    budget: str = ""
    """The budget that it is of, where the page can choose one."""


def markdown(table: Table) -> str:
    """A table as Markdown, its caption as bold text above it."""

    def cell(field: Field | str) -> str:
        if isinstance(field, str) or not field.small:
            return field if isinstance(field, str) else field.text
        return f"{field.text} ({field.small.replace(chr(10), ', ')})"

    head, *body = [f"| {' | '.join(map(cell, row))} |" for row in (table.header, *table.rows)]
    rule = "|---" + "|--:" * (len(table.header) - 1) + "|"
    return "\n".join([f"**{table.caption}**", "", head, rule, *body, ""])


def chosen_settings(comparison: Comparison) -> Notes:
    """Each method in the setting that was chosen for it, and how it was."""
    return {choice.setting: choice.note for choice in comparison.choices.values()}


def main_settings(comparison: Comparison) -> Notes:
    """Settings of the first table: all up to `FEW`, else the chosen ones, and how those were."""
    chosen, few = chosen_settings(comparison), len(comparison.settings) <= FEW
    wanted = comparison.settings if few else [*chosen]
    return {setting: chosen.get(setting, setting.details) for setting in wanted}


def every_setting(comparison: Comparison) -> Table:
    """The numbers of all presets and allocators, with and without protection."""
    every = {setting: setting.details for setting in comparison.settings}
    return some_settings(comparison, every, ", every setting of every method")


def some_settings(comparison: Comparison, lines: Notes, which: str = "") -> Table:
    """The numbers of some settings, marked where they differ from those of the best null.

    `which` settings they are, for a caption that tells all: of a model card, say.
    """
    grid = comparison.grid
    kinds = {setting.protection for setting in lines if setting.method != FULL}
    alike = "".join(kinds) if len(kinds) == 1 and not which else ""  # of all rows, said once
    own_size = any(setting.self_sized for setting in grid)  # last, what methods chose themselves
    over = {
        (setting, spec): gap
        for setting in lines
        for spec in comparison.budgets.specs
        if not comparison.unfinished and (gap := comparison.over_null(setting, spec)) is not None
    }
    differs = resolved_keys(over)
    rows: list[Sequence[Field | str]] = []
    for setting, note in lines.items():
        if not grid.get(setting):
            continue
        words = (word for word in note.split(", ") if word != alike)
        row = [_row_head(setting, ", ".join(words))]
        for spec in (*comparison.budgets.specs, *[SELF_SIZED] * own_size):
            number = _number(comparison, grid[setting], setting, spec)
            if (setting, spec) in differs:
                mark = "*" if over[setting, spec].mean > 0 else "†"
                number = replace(number, text=f"{number.text} {mark}")
            elif spec == SELF_SIZED and (own := grid[setting].get(spec)) is not None:
                size = f"at {100 * own.share:.1f} % ({own.kept_tokens:.0f})"
                number = replace(number, small=f"{number.small}\n{size}")
            row.append(number)
        rows.append(row)
    nulls, details = "", ""
    if over:
        nulls = f" * above the best null{' with the same protection' * bool(which)}, † below it "
        nulls += f"(paired by prompt, Holm's correction for {len(over)} differences)."
    elif not any(choice.setting.method in NULLS for choice in comparison.choices.values()):
        nulls = " No null was run (add nulls to --methods of kvp eval)."
    count = len(comparison.sorted.usable or comparison.sorted.tasks)
    tasks = f", mean over {count} tasks" if comparison.kind == "accuracy" and count > 1 else ""
    how = f", {SEEN[comparison.protocol]}{f', all methods {alike}' if alike else ''}"
    if which:
        sizes = "; (n): tokens per head" * comparison.budgets.relative
        how, details = f" ({comparison.interval})", f"{sizes}; {comparison.conditions}"
    return Table(
        caption=f"{comparison.unfinished} {comparison.measure.capitalize()}{tasks}{which}{how}"
        f"{details}{comparison.left_out}.{nulls}".lstrip(),
        header=("method", *budget_names(comparison.budgets), *["own size"] * own_size),
        rows=rows,
    )


def by_task(comparison: Comparison, spec: str) -> Table:
    """The chosen settings at one budget, a column per task."""
    rows: list[Sequence[Field | str]] = []
    for setting, note in chosen_settings(comparison).items():
        budget = SELF_SIZED if setting.self_sized else spec
        grids = comparison.tasks.values()
        fields = [_number(comparison, grid.get(setting, {}), setting, budget) for grid in grids]
        if any(field != NOTHING for field in fields):
            rows.append([_row_head(setting, note), *fields])
    return Table(
        caption=f"{comparison.measure.capitalize()}, task by task at {spec}, "
        f"{SEEN[comparison.protocol]}.",
        header=("method", *comparison.tasks),
        rows=rows,
        budget=spec,
    )


def differences(comparison: Comparison, numbers: DataFrame) -> Iterator[Table]:
    """Paired differences of the settings shown: to the full cache, and to the first that sentences
    are about, in points or nats of likelihood per token. `numbers` is `eval.results.frame.tidy`.
    """
    if numbers.empty:
        return
    of_all = numbers[numbers["task"] == OVERALL]
    points, specs = comparison.kind == "accuracy", comparison.budgets.specs
    form, scale = "+.1f" if points else "+.3f", comparison.scale
    lead = comparison.best.settings[0].label if comparison.best else ""
    for name, other in (("minus_full", "the full cache"), ("minus_lead", lead)):
        paired = of_all[of_all[name].notna()]
        rows: list[Sequence[Field | str]] = []
        shown = paired[paired["chosen"]].groupby(["method", "setting"], sort=False)
        for (method, setting), group in shown:
            cells = {}
            for row in group.to_dict("records"):
                low, high = (format(scale * row[f"{name}_{end}"], form) for end in ("low", "high"))
                text = f"{scale * row[name]:{form}}{' *' * bool(row[f'{name}_differs'])}"
                cells[row["budget"]] = Field(text=text, small=f"{low} to {high}")
            first = Field(text=method, small=setting, method=method)
            rows.append([first, *(cells.get(spec, NOTHING) for spec in specs)])
        if rows:
            tests = comparison.tests if name == "minus_lead" else len(paired)
            yield Table(
                caption=f"Each method minus {other}, {'points' if points else 'nats per token'}, "
                f"{SEEN[comparison.protocol]}. "
                f"* is not 0 (Holm's correction for {tests} differences).",
                header=("method", *budget_names(comparison.budgets)),
                rows=rows,
            )


def costs_of_requests(timings: Sequence[Timing]) -> Table:
    """Bytes and seconds of one protocol per method and budget."""
    rows: list[Sequence[Field | str]] = [
        [
            _row_head(timing.setting, timing.setting.details),
            "all" if timing.setting.method == FULL else f"{timing.budget:.0f}",
            f"{timing.cache_bytes:,.0f}",
            "–" if timing.bytes_to_full is None else f"{timing.bytes_to_full:.3f}",
            _interval_field(timing.prefill, 1000, ".1f"),
            _interval_field(timing.evict, 1000, ".1f"),
            *(
                "–" if share is None else f"{100 * share:.0f} %"
                for share in (timing.seconds, timing.flops)
            ),
            "1" if timing.setting.method == FULL else str(passes(timing.setting.method)),
            _interval_field(timing.decode, 1000, ".2f"),
            _interval_field(timing.decode_to_full, 1, ".3f"),
        ]
        for timing in timings
    ]
    counts = sorted({timing.decode.prompts for timing in timings if timing.decode})
    few = "" if all(timing.decode for timing in timings) else (
        "; seconds are left out where fewer than 6 prompts were timed one by one"
    )  # fmt: skip
    return Table(
        caption="One request at a time: cache bytes after eviction, and milliseconds, median and "
        f"its 95 % interval over {'/'.join(map(str, counts)) or 'no'} prompts{few}; "
        f"{SEEN[timings[0].protocol]}. Ratios are to the full cache, prompt by prompt.",
        header=(
            "method", "tokens per head", "cache bytes", "bytes / full", "prefill, ms",
            "score and evict, ms", "of the prefill's seconds", "of its FLOPs",
            "readings of the prompt", "decode, ms per token", "decode / full",
        ),
        rows=rows,
    )  # fmt: skip


def budget_names(budgets: Budgets) -> tuple[str, ...]:
    """Column headings: the budget as it was written and its mean size."""
    return tuple(
        f"{spec} ({size:.0f})" if budgets.relative else spec
        for spec, size in zip(budgets.specs, budgets.tokens, strict=True)
    )


def _row_head(setting: ReportedMethod, note: str) -> Field:
    return Field(text=setting.name, small=note, mark=_mark(setting), method=setting.family)


def _number(
    comparison: Comparison, of: Mapping[str | None, Estimate], setting: ReportedMethod, spec: str
) -> Field:
    """The estimate of a setting at a budget; the full cache is the same at every one."""
    estimate = of.get(None if setting.method == FULL and spec != SELF_SIZED else spec)
    if estimate is None:
        return NOTHING
    form = ".1f" if comparison.kind == "accuracy" else ".2f"
    number = _interval_field(estimate.interval, comparison.scale, form)
    alone = estimate.interval.low == estimate.interval.high
    return replace(number, small="" if alone else number.small, mark=_mark(setting))


def _interval_field(interval: Interval | None, scale: float, form: str) -> Field:
    if interval is None:
        return NOTHING
    mean, low, high = interval.texts(scale, form)
    return Field(text=mean, small=f"{low} to {high}")


def _mark(setting: ReportedMethod) -> str:
    if setting.method == LEARNED:
        return "learned"
    return "reference" if setting.method in (FULL, ORACLE) else ""
