"""From computed numbers to figure descriptions. No number is computed here beyond units."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from eval.report.aggregates import FULL, Budgets, Cell, Grid, Setting
from eval.report.best_settings import outstanding
from eval.report.compare import PROTOCOLS, Comparison, in_order, policy_words
from eval.report.costs import Costs, HeadCurve, mean_curve
from eval.report.figure_types import Axis, Line, LineFigure, MapFigure, Panel, Style
from eval.report.load import Results
from eval.report.token_ranks import TokenMap, protected_ranges
from eval.results.records import OWN

PERCENT = 100.0
MOST_LINES = 12
"""Lines that a figure shows before the reader asks for more."""
SMALL_COLUMNS = 4
"""Columns of the per-task figures."""


def overall(comparison: Comparison, styles: Mapping[str, Style]) -> LineFigure:
    """All tasks together against budget."""
    return _against_budget(
        comparison,
        styles,
        name=f"{comparison.kind}-{comparison.protocol}",
        panels={"": comparison.grid},
        what=", ".join(filter(None, (_measure(comparison), _pooled(comparison)))),
    )


def by_task(comparison: Comparison, styles: Mapping[str, Style]) -> LineFigure:
    """Task by task against budget."""
    return _against_budget(
        comparison,
        styles,
        name=f"{comparison.kind}-tasks-{comparison.protocol}",
        panels=comparison.tasks,
        what=f"{_measure(comparison)} task by task",
    )


def _against_budget(
    comparison: Comparison,
    styles: Mapping[str, Style],
    *,
    name: str,
    panels: Mapping[str, Grid],
    what: str,
) -> LineFigure:
    budgets = comparison.budgets
    places = [*budgets.places, *_own_places(comparison)]
    first, last = min(places), max(places)
    columns = min(SMALL_COLUMNS, len(panels))
    step = 1 if columns < 3 else 2
    named = set(budgets.specs[::-1][::step])
    return LineFigure(
        name=name,
        caption=f"{what}, against cache budget; bars are 95 % bootstrap intervals over "
        f"{'sequences' if comparison.kind == 'kept' else 'prompts'}{_remarks(comparison)}; "
        f"{comparison.conditions}.",
        panels=tuple(
            Panel(title=title, lines=tuple(_lines(comparison, grid, styles)))
            for title, grid in panels.items()
        ),
        columns=columns,
        x=Axis(
            label=budgets.label,
            log=True,
            ticks=tuple(
                (place, spec if spec in named else "")
                for place, spec in zip(budgets.places, budgets.specs, strict=True)
            ),
            limits=(first / 1.12, last * 1.12),
        ),
        y=Axis(
            label=_AXES[comparison.kind],
            log=comparison.kind == "perplexity",
            limits=(-3.0, 103.0) if comparison.kind == "accuracy" else None,
        ),
    )


def _lines(comparison: Comparison, grid: Grid, styles: Mapping[str, Style]) -> Iterable[Line]:
    scale = 1.0 if comparison.kind == "perplexity" else PERCENT
    first = _first(comparison)
    ends = [*comparison.budgets.places, *_own_places(comparison)]
    for family, choice in comparison.choices.items():
        cells = grid.get(choice.setting, {})
        flat = choice.setting.method == FULL
        if flat:  # the full cache is the same at every budget
            points = [(place, cells[None]) for place in (min(ends) / 1.12, max(ends) * 1.12)
                      if None in cells]  # fmt: skip
        else:
            points = _points(cells, comparison.budgets)
        if not points:
            continue
        yield Line(
            key=family,
            label=choice.label,
            style=styles[family],
            x=tuple(place for place, _ in points),
            y=tuple(scale * cell.interval.mean for _, cell in points),
            low=() if flat else tuple(scale * cell.interval.low for _, cell in points),
            high=() if flat else tuple(scale * cell.interval.high for _, cell in points),
            hidden=family not in first,
        )


def _points(cells: Mapping[str | None, Cell], budgets: Budgets) -> list[tuple[float, Cell]]:
    """Places and cells of one line; a size of the method's own is a point where it came to lie."""
    asked = [
        (place, cells[spec])
        for place, spec in zip(budgets.places, budgets.specs, strict=True)
        if spec in cells
    ]
    return [*asked, (_place(cells[OWN], budgets), cells[OWN])] if OWN in cells else asked


def _place(cell: Cell, budgets: Budgets) -> float:
    """Where a realised size lies on the axis of the budgets."""
    return PERCENT * cell.share if budgets.relative else cell.kept_tokens


def _own_places(comparison: Comparison) -> list[float]:
    chosen = [comparison.grid[choice.setting] for choice in comparison.choices.values()]
    return [_place(cells[OWN], comparison.budgets) for cells in chosen if OWN in cells]


def _first(comparison: Comparison) -> list[str]:
    """Families whose lines are shown before the reader asks for more."""
    return outstanding(
        comparison.grid,
        comparison.choices,
        MOST_LINES,
        higher_is_better=comparison.higher_is_better,
    )


def _remarks(comparison: Comparison) -> str:
    """What a reader of the figure must know beside its axes."""
    said = ""
    if _own_places(comparison):
        said += "; single points size the cache themselves and lie at the size they took"
    waiting = [family for family in comparison.choices if family not in _first(comparison)]
    if waiting:
        said += f"; switched on in the page's legend: {', '.join(waiting)}"
    return said


def cost_figures(
    results: Results,
    costs: Costs,
    shown: Mapping[str, Setting],
    protocol: str,
    styles: Mapping[str, Style],
) -> tuple[LineFigure, LineFigure]:
    """Cost per budget over all heads, and head by head."""
    families = in_order(list(shown))
    conditions = _cost_conditions(results, shown, protocol)
    heads = sorted({head for family in families for head in costs[shown[family]]})

    def lines(curves: Mapping[str, HeadCurve]) -> tuple[Line, ...]:
        return tuple(
            _cost_line(family, shown[family], styles[family], curve)
            for family, curve in curves.items()
        )

    x = Axis(label="budget, % of the cached tokens", limits=(0.0, 100.0))
    y = Axis(label="future attention lost, %", limits=(0.0, 102.0))
    means = {family: mean_curve(costs[shown[family]]) for family in families}
    mean = LineFigure(
        name=f"cost-{protocol}",
        caption=f"Share of future attention lost at every budget, mean over {len(heads)} heads "
        f"(their sum divided by {len(heads)}); {conditions}.",
        panels=(Panel(title="", lines=lines(means)),),
        columns=1,
        x=x,
        y=y,
    )
    of_family = {family: costs[shown[family]] for family in families}
    single = LineFigure(
        name=f"cost-heads-{protocol}",
        caption=f"The same for each KV head (rows: layers); {conditions}.",
        panels=tuple(
            Panel(
                title=f"layer {head[0]}, head {head[1]}",
                lines=lines({name: own[head] for name, own in of_family.items() if head in own}),
            )
            for head in heads
        ),
        columns=len({head for _, head in heads}),
        x=x,
        y=y,
    )
    return mean, single


def _cost_conditions(results: Results, shown: Mapping[str, Setting], protocol: str) -> str:
    """What the curves were measured on, for captions."""
    sequences = {row["sequences"] for row in results.curves if row["protocol"] == protocol}
    protected = any(setting.protected for setting in shown.values())
    kept = "first and last tokens kept by all" if protected else "no tokens protected"
    policies = policy_words(results.curves, "averaged")
    return (
        f"n = {'/'.join(str(n) for n in sorted(sequences))} held-out sequences, "
        f"seed {results.setting('seed')}{policies}; "
        f"{kept}; {PROTOCOLS.get(protocol, protocol)}"
    )


def _cost_line(family: str, setting: Setting, style: Style, curve: HeadCurve) -> Line:
    variant = "" if setting.variant == "auto" else f":{setting.variant}"
    return Line(
        key=family,
        label=f"{family}{variant}",
        style=style,
        x=tuple(PERCENT * share for share in curve.budgets),
        y=tuple(PERCENT * cost for cost in curve.cost),
        points=False,
    )


def token_figure(results: Results, tokens: TokenMap) -> MapFigure:
    """Methods x tokens, coloured by rank."""
    content = results.tokens or {}
    sinks, recents = results.setting("sinks") or 0, results.setting("recents") or 0
    return MapFigure(
        name="tokens",
        caption=f"Percent of tokens ranked below each token, mean over heads, ranks without "
        f"protection; n = 1 prompt ({content.get('task')}, {len(tokens.tokens)} tokens), "
        f"split {results.setting('split')}, seed {results.setting('seed')}, "
        f"{PROTOCOLS.get(str(content.get('protocol')), 'protocol not recorded')}; outlined: the "
        f"first {sinks} and last {recents} tokens, which protection keeps.",
        rows=tokens.methods,
        columns=tokens.tokens,
        values=tokens.means,
        outlined=protected_ranges(len(tokens.tokens), sinks, recents),
        x_label="token of the prompt",
        value_label="% ranked below",
    )


_AXES = {
    "accuracy": "accuracy, %",
    "perplexity": "perplexity of the given text",
    "kept": "future attention kept, %",
}


def _measure(comparison: Comparison) -> str:
    if comparison.kind == "accuracy":
        return "Accuracy (share of the references found)"
    if comparison.kind == "kept":
        return "Future attention kept, mean over all heads of the model"
    return "Perplexity of the given text"


def _pooled(comparison: Comparison) -> str:
    names = list(comparison.tasks)
    if not names:
        return ""
    if len(names) == 1:
        return f"task {names[0]}"
    return f"{'mean over' if comparison.kind == 'accuracy' else 'all of'} {len(names)} tasks"
