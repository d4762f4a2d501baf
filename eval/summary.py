"""The table at the end of a run: mean score per method and budget, with its interval."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from functools import partial
from statistics import fmean

from rich.console import Console
from rich.measure import Measurement
from rich.table import Table

from eval.records import FULL, SELF_SIZED, Record, method_label, policy_groups
from eval.report.aggregates import ReportedMethod, method_of
from eval.stats import (
    Bounds,
    Interval,
    Scores,
    bootstrap_mean,
    by_policy,
    holm,
    paired_difference,
    perplexity,
    prompt_values,
    prompts_of,
)
from kvp.budgets import parse_budget
from kvp.data.ruler import RULER_13
from kvp.data.tasks import ruler_share
from policies.registry import NULLS

FULL_COLUMN = "full"
PROTECTED = " +p"
NO_BETTER = "°"
"""Behind a mean that is not shown to be above the best null's."""
ENOUGH = 0.95
"""Of the full cache's answers, that is enough."""
SPREAD = "(± half of the 95 % interval)"
"""Shown next to each mean where the screen is wide enough."""
SEVERAL_SEEDS = "kvp: intervals are over prompts and training seeds"
ONE_SEED = "kvp, one training seed: what another seed would change is not in the interval"


@dataclass(frozen=True, kw_only=True)
class Line:
    """One method of one protocol: an estimate per budget."""

    protocol: str
    setting: ReportedMethod
    """The method, as reports tell settings apart."""
    label: str
    """Method, preset, allocator, and `+p` where first and last tokens are always kept."""
    cells: Mapping[str, Interval]
    """By budget spec; `full` for the full cache, `own` where the method sizes the cache."""
    scores: Mapping[str, Scores]
    """By budget, the number of every prompt (`eval.stats.prompt_values`)."""
    policies: int
    """Policies averaged, 0 for methods without."""
    over_null: Mapping[str, Interval | None]
    """By budget, the difference to the best null of the same protection where one was run; None
    where they share no prompt."""
    self_sized_share: float | None = None
    """Share of the cache it keeps where it sizes the cache itself, mean over records."""

    @property
    def method(self) -> str:
        """Name of the method alone."""
        return self.setting.method


@dataclass(frozen=True, kw_only=True)
class Headlines:
    """What a run shows at its end, one line per method of each protocol."""

    scores: list[Line]
    """Mean string-match score over all generated tasks; policy seeds averaged."""
    losses: list[Line]
    """Perplexity of the given replies over all tasks that have them."""
    notes: list[str]
    """Which of RULER's tasks the means are over."""
    resamples: int
    """Of every interval."""
    seed: int


def headlines(records: Iterable[Record], *, resamples: int = 2000, seed: int = 0) -> Headlines:
    """Group the records of a run and estimate every cell of its closing tables."""

    def score(group: list[Record]) -> Interval:
        return bootstrap_mean(by_policy(group), resamples=resamples, seed=seed)

    def loss(group: list[Record]) -> Interval:
        return perplexity(group, resamples=resamples, seed=seed)

    records = list(records)
    over = partial(over_null, resamples=resamples, seed=seed)
    answered = [record for record in records if record["score"] is not None]
    given = [record for record in records if record["nll"] is not None]
    return Headlines(
        scores=_lines(answered, score, partial(over, bounds=(-1, 1))),
        losses=_lines(given, loss, partial(over, bounds=None)),
        notes=[*_over("mean score", answered), *_over("perplexity", given)],
        resamples=resamples,
        seed=seed,
    )


def print_headlines(console: Console, shown: Headlines) -> None:
    """Print what was measured, at most 100 columns wide."""
    _print(console, shown.scores, "mean score, %", 100)
    _print(console, shown.losses, "perplexity of the given text", 1)
    for note in shown.notes:
        console.print(note, soft_wrap=True)


def _over(what: str, records: Iterable[Record]) -> list[str]:
    """A line on the tasks of a table with more than one of RULER's."""
    tasks = {record["task"] for record in records}
    several = len(tasks & set(RULER_13)) > 1
    return [f"{what}: over {ruler_share(tasks)}"] if several else []


def _lines(
    records: Sequence[Record],
    score: Callable[[list[Record]], Interval],
    over: Callable[[Scores, Scores], Interval | None],
) -> list[Line]:
    policies = policy_groups(records)
    groups: dict[tuple[str, str], dict[str, list[Record]]] = {}
    for record in records:
        cells = groups.setdefault((record["protocol"], _label(record, policies)), {})
        cells.setdefault(record["budget_spec"] or FULL_COLUMN, []).append(record)
    methods = list(dict.fromkeys(label.removesuffix(PROTECTED) for _, label in groups))

    def order(key: tuple[str, str]) -> tuple[int, bool]:
        return methods.index(key[1].removesuffix(PROTECTED)), key[1].endswith(PROTECTED)

    best = _best_nulls(records)
    lines = []
    for key in sorted(groups, key=order):
        first = next(iter(groups[key].values()))[0]
        place = key[0], first["protected"]
        scores = {budget: prompt_values(group) for budget, group in groups[key].items()}
        policy_names = {record["policy"] for group in groups[key].values() for record in group}
        sized = groups[key].get(SELF_SIZED, [])
        own = [record["kept_tokens"] / record["cached_tokens"] for record in sized]
        compared = {} if first["method"] in (FULL, *NULLS) else scores
        lines.append(
            Line(
                protocol=key[0],
                setting=method_of(first, policies),
                label=key[1],
                cells={budget: score(group) for budget, group in groups[key].items()},
                scores=scores,
                policies=len(policy_names - {None}),
                over_null={
                    budget: over(values, best[*place, budget])
                    for budget, values in compared.items() if (*place, budget) in best
                },
                self_sized_share=fmean(own) if own else None,
            )
        )  # fmt: skip
    return lines


def _best_nulls(records: Iterable[Record]) -> dict[tuple[str, bool, str], Scores]:
    """Values of the best null by protocol, protection and budget."""
    nulls: dict[tuple[str, bool, str], dict[str, list[Record]]] = {}
    for record in records:
        if record["method"] in NULLS:
            key = record["protocol"], record["protected"], record["budget_spec"]
            name = method_label(record["method"], record["variant"], record["allocator"])
            nulls.setdefault(key, {}).setdefault(name, []).append(record)
    return {
        key: max(
            map(prompt_values, methods.values()),
            key=lambda scores: bootstrap_mean(scores, bounds=None, resamples=1).mean,
        )
        for key, methods in nulls.items()
    }


def over_null(
    ours: Scores, null: Scores, *, bounds: Bounds | None, resamples: int, seed: int
) -> Interval | None:
    """Difference to a null, paired by prompt; None where the two share no prompt.

    Nulls score nothing (`policies.registry`), so every method has to beat the best one of the same
    budget and protection. It is the best on these very prompts, which favours the nulls.
    """
    if prompts_of(ours).isdisjoint(prompts_of(null)):
        return None
    return paired_difference(ours, null, bounds=bounds, resamples=resamples, seed=seed)


def _label(record: Record, policies: Mapping[str | None, str]) -> str:
    """Name of a record's method, seeds of one policy together."""
    group = policies[record["policy"]]
    name = f"{record['method']}/{group}" if group else record["method"]
    label = method_label(name, record["variant"], record["allocator"])
    return f"{label}{PROTECTED if record['protected'] else ''}"


def _print(console: Console, lines: list[Line], what: str, scale: int) -> None:
    for protocol in dict.fromkeys(line.protocol for line in lines):
        of_protocol = [line for line in lines if line.protocol == protocol]
        columns = sorted(
            {budget for line in of_protocol for budget in line.cells}, key=budget_order
        )
        no_better = _no_better(of_protocol)
        table = _table(of_protocol, columns, scale, no_better, spread=True)
        fits = _width(console, table) <= console.width
        console.print(f"{protocol}: {what}{f' {SPREAD}' if fits else ''}")
        if not fits:
            table = _table(of_protocol, columns, scale, no_better, spread=False)
        console.print(table, width=max(console.width, _width(console, table)), crop=False)
    if any(line.label.endswith(PROTECTED) for line in lines):
        console.print("+p: first and last tokens are always kept")
    if any(line.policies > 1 for line in lines):
        console.print(SEVERAL_SEEDS)
    if any(line.policies == 1 for line in lines):
        console.print(ONE_SEED)
    if any(line.over_null for line in lines):
        names = dict.fromkeys(line.method for line in lines if line.method in NULLS)
        console.print(
            f"{NO_BETTER}: not shown to be better than the best null ({', '.join(names)}) with the "
            "same protection (paired by prompt, at 5 %, Holm's correction for the table)"
        )
    if any(line.self_sized_share is not None for line in lines):
        console.print("own @: the size that the method chose, as a share of the cache")


def _no_better(lines: list[Line]) -> set[tuple[str, str]]:
    """Label and budget of the means of one table that are not shown to be above the best null's."""
    over = {
        (line.label, budget): gap
        for line in lines
        for budget, gap in line.over_null.items() if gap is not None
    }  # fmt: skip
    above = {
        key
        for (key, gap), resolved in zip(over.items(), holm(list(over.values())), strict=True)
        if resolved and gap.mean > 0
    }
    return {(line.label, budget) for line in lines for budget in line.over_null} - above


def _width(console: Console, table: Table) -> int:
    """Columns the table takes where nothing limits it."""
    return Measurement.get(console, console.options.update(max_width=10_000), table).maximum


def _table(
    lines: list[Line],
    columns: list[str],
    scale: int,
    no_better: set[tuple[str, str]],
    *,
    spread: bool,
) -> Table:
    def cell(line: Line, column: str) -> str:
        mark = NO_BETTER if (line.label, column) in no_better else ""
        return _cell(line, column, scale, mark, spread=spread)

    table = Table(box=None, pad_edge=False)
    table.add_column("method", no_wrap=True)
    for budget in columns:
        table.add_column(budget, justify="right", no_wrap=True)
    for line in lines:
        table.add_row(line.label, *(cell(line, column) for column in columns))
    return table


def budget_order(column: str) -> tuple[bool, bool, Decimal]:
    """Order of columns: shares, then token counts, each ascending; self-sized and full last."""
    if column in (SELF_SIZED, FULL_COLUMN):
        return True, True, Decimal(column == FULL_COLUMN)
    budget = parse_budget(column)
    return False, budget.percent is None, budget.percent or Decimal(budget.count or 0)


def curve_budgets(specs: Sequence[str]) -> tuple[str, ...]:
    """The budgets that a curve can be drawn through, smallest first.

    Of shares and token numbers, those that there are more of; not the full cache, nor one that a
    method sized itself.
    """
    shares = [spec for spec in specs if spec.endswith("%")]
    tokens = [spec for spec in specs if not spec.endswith("%") and spec not in (FULL, SELF_SIZED)]
    return tuple(sorted(shares if len(shares) >= len(tokens) else tokens, key=budget_order))


def enough(means: Mapping[str, float], full: float) -> str | None:
    """The smallest budget from which on means are `ENOUGH` of the full cache's; None for none.

    None, too, where the full cache answers nothing.
    """
    least = None
    if full <= 0:
        return None
    for spec in reversed(curve_budgets(list(means))):
        if means[spec] < ENOUGH * full:
            break
        least = spec
    return least


def _cell(line: Line, column: str, scale: int, mark: str, *, spread: bool) -> str:
    value = line.cells.get(column)
    if value is None:
        return ""
    half = (value.high - value.low) / 2 * scale
    digits = 0 if scale == 100 else 2
    size = (
        f" @{line.self_sized_share:.0%}"
        if column == SELF_SIZED and line.self_sized_share is not None
        else ""
    )
    around = f" ±{half:.{digits}f}" if spread and half else ""  # of one text there is no interval
    return f"{value.mean * scale:.{digits}f}{around}{mark}{size}"
