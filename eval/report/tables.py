"""From computed numbers to tables. No number is computed here beyond units and rounding."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from eval.report.against_nulls import OverNulls, null_words, over_nulls, with_null
from eval.report.aggregates import Budgets, Estimate, Grid, ReportedMethod
from eval.report.best_settings import (
    BaselineDifference,
    Comparison,
    clearly_best,
    differences_to_baseline,
    in_order,
)
from eval.report.costs import Area, Timing
from eval.report.page import Field, Table
from eval.report.schema import PROTOCOL_NAMES
from eval.results.records import FULL, LEARNED, ORACLE, SELF_SIZED, UNIFORM
from eval.stats import Interval, holm

BEST = (
    "highlighted: better than every other method of its column by intervals that do not overlap, "
    "full cache and oracle apart"
)
"""Meaning of the mark `best`, for captions."""
SECONDS_LEFT_OUT = "; seconds are left out where fewer than 6 prompts were timed one by one"
Line = tuple[str, str, ReportedMethod]
"""A line of a table: name, note and setting."""


def headline(comparison: Comparison, attention_free: Collection[str], *, resamples: int) -> Table:
    """One line per method, and each learned policy minus the best attention-free baseline."""
    lines = lines_shown(comparison)
    over = over_nulls(comparison, comparison.grid, lines)
    gaps = _gaps(comparison, attention_free, resamples=resamples)
    resolved = _resolved({**_intervals(over), **{key: gap.difference for key, gap in gaps.items()}})
    rows = _grid_rows(comparison, comparison.grid, lines, over, resolved, highlight=True)
    rows += _difference_rows(comparison, gaps, resolved)
    return Table(
        caption=f"{_title(comparison)} ({comparison.interval}); {BEST}{null_words(comparison)}"
        f"{_star_words(len(over) + len(gaps))}; {comparison.conditions}.",
        header=_header(comparison),
        rows=rows,
    )


def lines_shown(comparison: Comparison) -> list[Line]:
    """Name, note and setting of each method, in the setting that was chosen for it."""
    return [(choice.name, choice.note, choice.setting) for choice in comparison.choices.values()]


def lines_of_all(comparison: Comparison) -> list[Line]:
    """Name, details and setting: all presets and allocators, with and without protection."""
    ordered = in_order(list(dict.fromkeys(setting.family for setting in comparison.grid)))
    settings = sorted(
        comparison.grid,
        key=lambda item: (
            ordered.index(item.family),
            item.variant != "auto",
            item.variant,
            item.allocator != UNIFORM,
            item.allocator,
            not item.protected,
        ),
    )
    return [_named(setting) for setting in settings]


def every_setting(comparison: Comparison) -> Table:
    """All presets and allocators, with and without protection."""
    return some_settings(comparison, lines_of_all(comparison), ", every setting of every method")


def some_settings(comparison: Comparison, lines: Sequence[Line], which: str = "") -> Table:
    """The numbers of some settings; `which` are they, for the caption."""
    over = over_nulls(comparison, comparison.grid, lines)
    return Table(
        caption=f"{_title(comparison)}{which} ({comparison.interval}){null_words(comparison)}"
        f"{_star_words(len(over))}; {comparison.conditions}.",
        header=_header(comparison),
        rows=_grid_rows(comparison, comparison.grid, lines, over, _resolved(_intervals(over))),
    )


def one_task(comparison: Comparison, task: str) -> Table:
    """The headline's methods on one task."""
    lines = [(choice.name, "", choice.setting) for choice in comparison.choices.values()]
    grid = comparison.tasks[task]
    over = over_nulls(comparison, grid, lines)
    resolved = _resolved(_intervals(over))
    return Table(
        caption=f"{task}: accuracy, % ({comparison.interval}); {BEST}{null_words(comparison)}"
        f"{_star_words(len(over))}; {PROTOCOL_NAMES[comparison.protocol]}.",
        header=_header(comparison),
        rows=_grid_rows(comparison, grid, lines, over, resolved, highlight=True),
    )


def cache_bytes(comparison: Comparison) -> Table | None:
    """Measured bytes of the cache after eviction, against the full cache's; None where unmeasured.

    One line per setting that a figure shows.
    """
    whole = None if comparison.full is None else comparison.full.nbytes
    columns = [*comparison.budgets.specs, *([SELF_SIZED] if _has_self_sized(comparison) else [])]
    rows: list[Sequence[Field | str]] = []
    for choice in comparison.choices.values():
        estimates = comparison.grid.get(choice.setting, {})
        is_full = choice.setting.method == FULL
        shown = [estimates.get(None if is_full else spec) for spec in columns]
        if any(estimate is not None and estimate.nbytes is not None for estimate in shown):
            name = Field(text=choice.name, small=choice.note, mark=_mark(choice.setting.family))
            rows.append([name, *(_bytes(estimate, whole) for estimate in shown)])
    if not rows:
        return None
    return Table(
        caption="Bytes of keys and values right after the eviction, as measured, mean over "
        f"prompts, and their ratio to the full cache; {PROTOCOL_NAMES[comparison.protocol]}.",
        header=_header(comparison),
        rows=rows,
    )


def _bytes(estimate: Estimate | None, whole: float | None) -> Field:
    if estimate is None or estimate.nbytes is None:
        return Field(text="–")
    ratio = f"{estimate.nbytes / whole:.3f} of full" if whole else ""
    return Field(text=f"{estimate.nbytes:,.0f}", small=ratio)


def areas(by_setting: Mapping[ReportedMethod, Area], protocol: str) -> Table:
    """Area under the cost curves of every setting, against the oracle's (`kvp.metrics`)."""
    families = in_order(list(dict.fromkeys(setting.family for setting in by_setting)))
    lines = dict.fromkeys((family, setting.variant) for family in families
                          for setting in by_setting if setting.family == family)  # fmt: skip
    kinds = [kept for kept in (True, False) if any(item.protected == kept for item in by_setting)]
    rows = []
    for family, variant in lines:
        name = family if variant == "auto" else f"{family}:{variant}"
        row: list[Field | str] = [Field(text=name, mark=_mark(family))]
        for kept in kinds:
            wanted = (family, variant, kept)
            row += _area_fields(
                next((area for item, area in by_setting.items() if _area_key(item) == wanted), None)
            )
        rows.append(row)
    words = ["protected" if kept else "unprotected" for kept in kinds]
    titles = [title for word in words for title in (f"area / oracle, {word}", f"skill, {word}")]
    return Table(
        caption="Area under the cost curves summed over heads, as a multiple of the oracle's with "
        "the same protection (mean over policies, range below), and mean skill; "
        "skill = (chance - cost) / (chance - ideal), both with the same protected tokens: 1 is "
        "ideal, 0 is chance; area over all budgets; "
        f"{PROTOCOL_NAMES[protocol]}.",
        header=("method", *titles),
        rows=rows,
    )


def costs_of_requests(timings: Sequence[Timing]) -> Table:
    """Bytes and seconds per method and budget."""
    protocols = {timing.protocol for timing in timings}
    rows = [
        (
            Field(text=_name(timing.setting), mark=_mark(timing.setting.family)),
            "all" if timing.setting.method == FULL else f"{timing.budget:.0f}",
            f"{timing.cache_bytes:,.0f}",
            _ratio(timing.bytes_to_full),
            _median(timing.prefill, 1000, 1),
            _median(timing.evict, 1000, 1),
            _median(timing.decode, 1000, 2),
            _median(timing.decode_to_full, 1, 3),
        )
        for timing in timings
    ]
    named = ", ".join(PROTOCOL_NAMES[name] for name in protocols if name)
    timed = [timing.decode for timing in timings]
    counts = "/".join(str(n) for n in sorted({median.prompts for median in timed if median}))
    left_out = SECONDS_LEFT_OUT if None in timed else ""
    return Table(
        caption="One request at a time: cache bytes after eviction, and milliseconds, median and "
        f"its 95 % interval over {counts or 'no'} prompts{left_out}"
        f"{'; ' + named if named else ''}. Ratios are to the full cache, prompt by prompt.",
        header=(
            "method",
            "tokens per head",
            "cache bytes",
            "bytes / full",
            "prefill, ms",
            "score and evict, ms",
            "decode, ms per token",
            "decode / full",
        ),
        rows=rows,
    )


def budget_names(budgets: Budgets) -> tuple[str, ...]:
    """Column headings: the budget as it was written and its mean size."""
    return tuple(
        f"{spec} ({size:.0f})" if budgets.relative else spec
        for spec, size in zip(budgets.specs, budgets.tokens, strict=True)
    )


def _header(comparison: Comparison) -> tuple[str, ...]:
    self_sized = ("own size",) if _has_self_sized(comparison) else ()
    return ("method", *budget_names(comparison.budgets), *self_sized)


def _has_self_sized(comparison: Comparison) -> bool:
    grids = (comparison.grid, *comparison.tasks.values())
    return any(setting.self_sized for grid in grids for setting in grid)


def _grid_rows(
    comparison: Comparison,
    grid: Grid,
    lines: Sequence[Line],
    over: OverNulls,
    resolved: Collection[object],
    *,
    highlight: bool = False,
) -> list[Sequence[Field | str]]:
    best = {
        (family, spec)
        for spec in (comparison.budgets.specs if highlight else ())
        for family in clearly_best(
            grid, comparison.choices, spec, higher_is_better=comparison.higher_is_better
        )
    }
    rows: list[Sequence[Field | str]] = []
    for name, note, setting in lines:
        estimates = grid.get(setting, {})
        if not estimates:
            continue
        mark = _mark(setting.family)
        row: list[Field | str] = [Field(text=name, small=note, mark=mark)]
        for spec in comparison.budgets.specs:
            estimate = estimates.get(None if setting.method == FULL else spec)
            number = _number(
                comparison, estimate, "best" if (setting.family, spec) in best else mark
            )
            key = setting, spec
            row.append(with_null(number, comparison, over.get(key), resolved=key in resolved))
        if _has_self_sized(comparison):
            row.append(_number(comparison, estimates.get(SELF_SIZED), mark, with_size=True))
        rows.append(row)
    return rows


def _number(
    comparison: Comparison, estimate: Estimate | None, mark: str, *, with_size: bool = False
) -> Field:
    if estimate is None:
        return Field(text="–")
    interval = estimate.interval
    scale, digits = (1, 2) if comparison.kind == "perplexity" else (100, 1)
    mean, low, high = (
        f"{scale * value:.{digits}f}" for value in (interval.mean, interval.low, interval.high)
    )
    small = "" if interval.low == interval.high else f"{low} to {high}"
    if with_size:
        small += f"\nat {100 * estimate.share:.1f} % ({estimate.kept_tokens:.0f})"
    return Field(text=mean, small=small, mark=mark)


def _gaps(
    comparison: Comparison, attention_free: Collection[str], *, resamples: int
) -> dict[tuple[str, str], BaselineDifference]:
    """Policies minus the best attention-free baseline, by policy group and budget; of scores."""
    if comparison.kind != "accuracy":
        return {}
    return {
        (gap.family, spec): gap
        for spec in comparison.budgets.specs
        for gap in differences_to_baseline(comparison, spec, attention_free, resamples=resamples)
    }


def _intervals(over: OverNulls) -> dict[object, Interval]:
    return {key: gap for key, (_, gap) in over.items()}


def _resolved(gaps: Mapping[object, Interval]) -> set[object]:
    """Keys of the differences of one table that are not 0 (Holm)."""
    return {key for key, resolved in zip(gaps, holm(list(gaps.values())), strict=True) if resolved}


def _star_words(count: int) -> str:
    """Meaning of the star, for captions; empty in a table without differences."""
    if not count:
        return ""
    several = f"Holm's correction for the {count} differences of the table"
    return f"; * differs from 0 at 5 %{f' after {several}' if count > 1 else ''}"


def _difference_rows(
    comparison: Comparison,
    gaps: Mapping[tuple[str, str], BaselineDifference],
    resolved: Collection[object],
) -> list[Sequence[Field | str]]:
    fields = {key: _difference(gap, resolved=key in resolved) for key, gap in gaps.items()}
    return [
        [
            Field(text=f"{family} minus best attention-free", small="points, paired by prompt"),
            *(fields.get((family, spec), Field(text="–")) for spec in comparison.budgets.specs),
            *(["–"] if _has_self_sized(comparison) else []),
        ]
        for family in dict.fromkeys(family for family, _ in gaps)
    ]


def _difference(gap: BaselineDifference, *, resolved: bool) -> Field:
    difference = gap.difference
    remarks = [gap.baseline]
    if gap.both_reach_full:
        remarks.append("both reach full")
    return Field(
        text=f"{100 * difference.mean:+.1f}{' *' if resolved else ''}",
        small="\n".join([f"{100 * difference.low:+.1f} to {100 * difference.high:+.1f}", *remarks]),
    )


def _area_key(setting: ReportedMethod) -> tuple[str, str, bool]:
    return setting.family, setting.variant, setting.protected


def _area_fields(area: Area | None) -> list[Field | str]:
    if area is None:
        return [Field(text="–"), Field(text="–")]
    ratio = Field(text="–")
    if area.ratios:
        spread = ""
        if len(area.ratios) > 1:
            spread = f"{min(area.ratios):.2f} to {max(area.ratios):.2f}"
        ratio = Field(text=f"{sum(area.ratios) / len(area.ratios):.2f}", small=spread)
    return [ratio, "–" if area.skill is None else f"{area.skill:.2f}"]


def _title(comparison: Comparison) -> str:
    if comparison.kind == "accuracy":
        return f"Accuracy, %, mean over {len(comparison.tasks)} tasks"
    if comparison.kind == "kept":
        return "Future attention kept, %, mean over all heads"
    return "Perplexity of the given text"


def _name(setting: ReportedMethod) -> str:
    return f"{setting.family} ({setting.details})" if setting.details else "full cache"


def _named(setting: ReportedMethod) -> tuple[str, str, ReportedMethod]:
    return (setting.family if setting.details else "full cache", setting.details, setting)


def _mark(family: str) -> str:
    method = family.partition("/")[0]
    if method == LEARNED:
        return "learned"
    return "reference" if method in (FULL, ORACLE) else ""


def _median(median: Interval | None, scale: float, digits: int) -> Field:
    if median is None:
        return Field(text="–")
    middle, low, high = (
        f"{scale * value:.{digits}f}" for value in (median.mean, median.low, median.high)
    )
    return Field(text=middle, small=f"{low} to {high}")


def _ratio(value: float | None) -> str:
    return "–" if value is None else f"{value:.3f}"
