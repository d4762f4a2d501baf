"""From computed numbers to figure descriptions. No number is computed here beyond units."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from eval.report.compare import PROTOCOLS, Comparison, in_order, policy_words
from eval.report.costs import Costs, HeadCurve, mean_curve
from eval.report.figure import Axis, Line, LineFigure, MapFigure, Panel, Style
from eval.report.load import Results
from eval.report.numbers import FULL, Budgets, Cell, Grid, Setting
from eval.report.ranks import TokenMap, protected_ranges

PERCENT = 100.0
SMALL_COLUMNS = 4
"""Columns of the per-task figures."""


def overall(comparison: Comparison, styles: Mapping[str, Style]) -> LineFigure:
    """All tasks together against budget."""
    return _against_budget(
        comparison,
        styles,
        name=f"{comparison.kind}-{comparison.protocol}",
        panels={"": comparison.grid},
        what=f"{_measure(comparison)}, {_pooled(comparison)}",
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
    accuracy = comparison.kind == "accuracy"
    first, last = budgets.places[0], budgets.places[-1]
    columns = min(SMALL_COLUMNS, len(panels))
    step = 1 if columns < 3 else 2
    named = set(budgets.specs[::-1][::step])
    return LineFigure(
        name=name,
        caption=f"{what}, against cache budget; bars are 95 % bootstrap intervals over prompts; "
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
            label="accuracy, %" if accuracy else "perplexity of the reply",
            log=not accuracy,
            limits=(-3.0, 103.0) if accuracy else None,
        ),
    )


def _lines(comparison: Comparison, grid: Grid, styles: Mapping[str, Style]) -> Iterable[Line]:
    scale = PERCENT if comparison.kind == "accuracy" else 1.0
    for family, choice in comparison.choices.items():
        cells = grid.get(choice.setting, {})
        points = _points(cells, comparison.budgets, reference=choice.setting.method == FULL)
        if not points:
            continue
        flat = choice.setting.method == FULL
        yield Line(
            key=family,
            label=choice.label,
            style=styles[family],
            x=tuple(place for place, _ in points),
            y=tuple(scale * cell.interval.mean for _, cell in points),
            low=() if flat else tuple(scale * cell.interval.low for _, cell in points),
            high=() if flat else tuple(scale * cell.interval.high for _, cell in points),
        )


def _points(
    cells: Mapping[str | None, Cell], budgets: Budgets, *, reference: bool
) -> list[tuple[float, Cell]]:
    """Places and cells of one line; the full cache is the same at every budget."""
    if reference:
        ends = (budgets.places[0] / 1.12, budgets.places[-1] * 1.12)
        return [(place, cells[None]) for place in ends if None in cells]
    return [
        (place, cells[spec])
        for place, spec in zip(budgets.places, budgets.specs, strict=True)
        if spec in cells
    ]


def cost_figures(
    results: Results,
    costs: Costs,
    shown: Mapping[str, Setting],
    protocol: str,
    styles: Mapping[str, Style],
) -> tuple[LineFigure, LineFigure]:
    """Cost per budget over all heads, and head by head."""
    families = in_order(list(shown))
    sequences = {row["sequences"] for row in results.curves if row["protocol"] == protocol}
    protected = any(setting.protected for setting in shown.values())
    kept = "first and last tokens kept by all" if protected else "no tokens protected"
    policies = policy_words(results.curves, "averaged")
    conditions = (
        f"n = {'/'.join(str(n) for n in sorted(sequences))} held-out sequences, "
        f"seed {results.setting('seed')}{policies}; "
        f"{kept}; {PROTOCOLS.get(protocol, protocol)}"
    )
    heads = sorted({head for family in families for head in costs[shown[family]]})
    kv_heads = len({head for _, head in heads})

    def line(family: str, curve: HeadCurve) -> Line:
        setting = shown[family]
        variant = "" if setting.variant == "auto" else f":{setting.variant}"
        return Line(
            key=family,
            label=f"{family}{variant}",
            style=styles[family],
            x=tuple(PERCENT * share for share in curve.budgets),
            y=tuple(PERCENT * cost for cost in curve.cost),
            points=False,
        )

    x = Axis(label="budget, % of the cached tokens", limits=(0.0, 100.0))
    y = Axis(label="future attention lost, %", limits=(0.0, 102.0))
    mean = LineFigure(
        name=f"cost-{protocol}",
        caption=f"Share of future attention lost at every budget, mean over {len(heads)} heads "
        f"(their sum divided by {len(heads)}); {conditions}.",
        panels=(
            Panel(
                title="",
                lines=tuple(line(name, mean_curve(costs[shown[name]])) for name in families),
            ),
        ),
        columns=1,
        x=x,
        y=y,
    )
    single = LineFigure(
        name=f"cost-heads-{protocol}",
        caption=f"The same for each KV head (rows: layers); {conditions}.",
        panels=tuple(
            Panel(
                title=f"layer {head[0]}, head {head[1]}",
                lines=tuple(
                    line(name, costs[shown[name]][head])
                    for name in families
                    if head in costs[shown[name]]
                ),
            )
            for head in heads
        ),
        columns=kv_heads,
        x=x,
        y=y,
    )
    return mean, single


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


def _measure(comparison: Comparison) -> str:
    if comparison.kind == "accuracy":
        return "Accuracy (share of the references found)"
    return "Perplexity of the given reply"


def _pooled(comparison: Comparison) -> str:
    names = list(comparison.tasks)
    if len(names) == 1:
        return f"task {names[0]}"
    return f"{'mean over' if comparison.kind == 'accuracy' else 'all of'} {len(names)} tasks"
