"""From computed numbers to tables. No number is computed here beyond units and rounding."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from eval.report.aggregates import FULL, LEARNED, ORACLE, Budgets, Cell, Grid, Setting
from eval.report.best_settings import Contest, best_baselines, contests
from eval.report.compare import PROTOCOLS, Comparison, in_order
from eval.report.costs import Area
from eval.report.markup import Field, Table
from eval.report.timings import Timing
from eval.results.records import OWN, UNIFORM


def headline(comparison: Comparison, attention_free: Collection[str], *, resamples: int) -> Table:
    """One line per method, and each learned policy against the best attention-free baseline."""
    rows = _grid_rows(
        comparison,
        comparison.grid,
        [(choice.name, choice.note, choice.setting) for choice in comparison.choices.values()],
        attention_free,
    )
    if comparison.kind == "accuracy":
        rows += _contest_rows(comparison, attention_free, resamples=resamples)
    best = (
        "the best attention-free baseline at each budget is underlined; " if attention_free else ""
    )
    return Table(
        caption=f"{_title(comparison)} (95 % bootstrap interval over prompts); "
        f"{best}{comparison.conditions}.",
        header=_header(comparison),
        rows=rows,
    )


def every_setting(comparison: Comparison) -> Table:
    """All presets and allocators, with and without protection."""
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
    return Table(
        caption=f"{_title(comparison)}, every setting of every method; {comparison.conditions}.",
        header=_header(comparison),
        rows=_grid_rows(comparison, comparison.grid, [_named(setting) for setting in settings], ()),
    )


def one_task(comparison: Comparison, task: str, attention_free: Collection[str]) -> Table:
    """The headline's methods on one task."""
    lines = [(choice.name, "", choice.setting) for choice in comparison.choices.values()]
    return Table(
        caption=f"{task}: accuracy, % (95 % bootstrap interval over prompts); "
        f"{PROTOCOLS.get(comparison.protocol, comparison.protocol)}.",
        header=_header(comparison),
        rows=_grid_rows(comparison, comparison.tasks[task], lines, attention_free),
    )


def bytes_held(comparison: Comparison) -> Table | None:
    """Measured bytes of the cache after eviction, against the full cache's; None where unmeasured.

    One line per setting that a figure shows.
    """
    full = comparison.choices.get(FULL)
    whole = None if full is None else comparison.grid[full.setting][None].nbytes
    columns = [*comparison.budgets.specs, *([OWN] if _has_own(comparison) else [])]
    rows: list[Sequence[Field | str]] = []
    for choice in comparison.choices.values():
        cells = comparison.grid[choice.setting]
        own = choice.setting.method == FULL
        found = [cells.get(None if own else spec) for spec in columns]
        if any(cell is not None and cell.nbytes is not None for cell in found):
            name = Field(text=choice.name, small=choice.note, mark=_mark(choice.setting.family))
            rows.append([name, *(_bytes(cell, whole) for cell in found)])
    if not rows:
        return None
    return Table(
        caption="Bytes of keys and values right after the eviction, as measured, mean over "
        "prompts, and their ratio to the full cache; "
        f"{PROTOCOLS.get(comparison.protocol, comparison.protocol)}.",
        header=_header(comparison),
        rows=rows,
    )


def _bytes(cell: Cell | None, whole: float | None) -> Field:
    if cell is None or cell.nbytes is None:
        return Field(text="–")
    ratio = "" if whole is None else f"{cell.nbytes / whole:.3f} of full"
    return Field(text=f"{cell.nbytes:,.0f}", small=ratio)


def areas(found: Mapping[Setting, Area], protocol: str) -> Table:
    """Area under the cost curves of every setting, against the oracle's."""
    families = in_order(list(dict.fromkeys(setting.family for setting in found)))
    lines = dict.fromkeys((family, setting.variant) for family in families
                          for setting in found if setting.family == family)  # fmt: skip
    kinds = [kept for kept in (True, False) if any(item.protected == kept for item in found)]
    rows = []
    for family, variant in lines:
        name = family if variant == "auto" else f"{family}:{variant}"
        row: list[Field | str] = [Field(text=name, mark=_mark(family))]
        for kept in kinds:
            chosen = (family, variant, kept)
            row += _area_fields(
                next((area for item, area in found.items() if _line(item) == chosen), None)
            )
        rows.append(row)
    words = ["protected" if kept else "unprotected" for kept in kinds]
    titles = [title for word in words for title in (f"area / oracle, {word}", f"skill, {word}")]
    return Table(
        caption="Area under the cost curves summed over heads, as a multiple of the oracle's with "
        "the same protection (mean over policies, range below), and skill (1 = ideal order, "
        f"0 = random order); {PROTOCOLS.get(protocol, protocol)}.",
        header=("method", *titles),
        rows=rows,
    )


def costs_of_requests(found: Sequence[Timing], prompts: str) -> Table:
    """Bytes and seconds per method and budget."""
    protocols = {timing.protocol for timing in found}
    rows = [
        (
            Field(text=_name(timing.setting), mark=_mark(timing.setting.family)),
            "all" if timing.setting.method == FULL else f"{timing.budget:.0f}",
            f"{timing.cache_bytes:,.0f}",
            _ratio(timing.bytes_to_full),
            f"{1000 * timing.prefill_seconds:.1f}",
            f"{1000 * timing.evict_seconds:.1f}",
            f"{1000 * timing.decode_seconds:.2f}",
            _ratio(timing.decode_to_full),
        )
        for timing in found
    ]
    named = ", ".join(PROTOCOLS.get(name, name) for name in protocols if name)
    return Table(
        caption=f"One request at a time: cache bytes after eviction, and milliseconds{prompts}"
        f"{'; ' + named if named else ''}. Ratios are to the full cache.",
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
    """Column headings: the budget as asked for and its mean size."""
    return tuple(
        f"{spec} ({size:.0f})" if budgets.relative else spec
        for spec, size in zip(budgets.specs, budgets.tokens, strict=True)
    )


def _header(comparison: Comparison) -> tuple[str, ...]:
    own = ("own size",) if _has_own(comparison) else ()
    return ("method", *budget_names(comparison.budgets), *own)


def _has_own(comparison: Comparison) -> bool:
    return any(setting.own for setting in comparison.grid)


def _grid_rows(
    comparison: Comparison,
    grid: Grid,
    lines: Sequence[tuple[str, str, Setting]],
    attention_free: Collection[str],
) -> list[Sequence[Field | str]]:
    best = {
        (family, spec)
        for spec in comparison.budgets.specs
        for family in best_baselines(
            grid,
            comparison.choices,
            spec,
            attention_free,
            higher_is_better=comparison.higher_is_better,
        )
    }
    rows: list[Sequence[Field | str]] = []
    for name, note, setting in lines:
        cells = grid.get(setting, {})
        if not cells:
            continue
        mark = _mark(setting.family)
        row: list[Field | str] = [Field(text=name, small=note, mark=mark)]
        for spec in comparison.budgets.specs:
            cell = cells.get(None if setting.method == FULL else spec)
            row.append(
                _number(comparison, cell, "best" if (setting.family, spec) in best else mark)
            )
        if _has_own(comparison):
            row.append(_number(comparison, cells.get(OWN), mark, own=True))
        rows.append(row)
    return rows


def _number(comparison: Comparison, cell: Cell | None, mark: str, *, own: bool = False) -> Field:
    if cell is None:
        return Field(text="–")
    interval = cell.interval
    scale, digits = (1, 2) if comparison.kind == "perplexity" else (100, 1)
    mean, low, high = (
        f"{scale * value:.{digits}f}" for value in (interval.mean, interval.low, interval.high)
    )
    small = f"{low} to {high}"
    if own:
        small += f"\nat {100 * cell.share:.1f} % ({cell.kept_tokens:.0f})"
    return Field(text=mean, small=small, mark=mark)


def _contest_rows(
    comparison: Comparison, attention_free: Collection[str], *, resamples: int
) -> list[Sequence[Field | str]]:
    found: dict[str, dict[str, Contest]] = {}
    for spec in comparison.budgets.specs:
        for contest in contests(
            comparison.grid, comparison.choices, spec, attention_free, resamples=resamples
        ):
            found.setdefault(contest.family, {})[spec] = contest
    return [
        [
            Field(text=f"{family} minus best attention-free", small="points, paired by prompt"),
            *(_contest(by_spec.get(spec)) for spec in comparison.budgets.specs),
            *(["–"] if _has_own(comparison) else []),
        ]
        for family, by_spec in found.items()
    ]


def _contest(contest: Contest | None) -> Field:
    if contest is None:
        return Field(text="–")
    difference = contest.difference
    remarks = [contest.baseline]
    if not difference.excludes_zero:
        remarks.append("not significant")
    if contest.both_reach_full:
        remarks.append("both reach full")
    return Field(
        text=f"{100 * difference.mean:+.1f}",
        small="\n".join([f"{100 * difference.low:+.1f} to {100 * difference.high:+.1f}", *remarks]),
    )


def _line(setting: Setting) -> tuple[str, str, bool]:
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
    return [ratio, f"{area.skill:.2f}"]


def _title(comparison: Comparison) -> str:
    if comparison.kind == "accuracy":
        return f"Accuracy, %, mean over {len(comparison.tasks)} tasks"
    if comparison.kind == "kept":
        return "Future attention kept, %, mean over all heads"
    return "Perplexity of the given text"


def _name(setting: Setting) -> str:
    return f"{setting.family} ({setting.how})" if setting.how else "full cache"


def _named(setting: Setting) -> tuple[str, str, Setting]:
    return (setting.family if setting.how else "full cache", setting.how, setting)


def _mark(family: str) -> str:
    method = family.partition("/")[0]
    if method == LEARNED:
        return "learned"
    return "reference" if method in (FULL, ORACLE) else ""


def _ratio(value: float | None) -> str:
    return "–" if value is None else f"{value:.3f}"
