"""The closing table of a run: mean score per method and budget with its interval, per protocol."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from decimal import Decimal

from rich.console import Console
from rich.measure import Measurement
from rich.table import Table

from eval.results.records import OWN, Row, method_label, policy_groups
from eval.stats import Interval, Scores, bootstrap_mean, by_policy, perplexity
from kvp.budgets import parse_budget

FULL_COLUMN = "full"
PROTECTED = " +p"
SPREAD = "(± half of the 95 % interval)"
"""Shown next to each mean where the screen is wide enough."""
SEVERAL_SEEDS = "kvp: intervals are over prompts and training seeds"
ONE_SEED = "kvp, one training seed: what another seed would change is not in the interval"


@dataclass(frozen=True, kw_only=True)
class Line:
    """One method of one protocol: an estimate per budget."""

    protocol: str
    method: str
    """Name of the method alone."""
    label: str
    """Method, preset, allocator, and `+p` where first and last tokens are always kept."""
    cells: Mapping[str, Interval]
    """By budget spec; `full` for the full cache, `own` for a size of the method's own."""
    policies: int
    """Policies averaged, 0 for methods without."""
    scores: Mapping[str, Scores] = field(default_factory=dict)
    """By budget, what the means are over; empty for perplexities."""
    own_share: float | None = None
    """Share of the cache it keeps where it sizes the cache itself, mean over records."""


def headline(records: Iterable[Row], *, resamples: int = 2000, seed: int = 0) -> list[Line]:
    """Mean string-match score over all generated tasks, policy seeds averaged."""

    def score(group: list[Row]) -> Interval:
        return bootstrap_mean(by_policy(group), resamples=resamples, seed=seed)

    return _lines((record for record in records if record["score"] is not None), score, by_policy)


def perplexity_headline(
    records: Iterable[Row], *, resamples: int = 2000, seed: int = 0
) -> list[Line]:
    """Perplexity of the given replies over all dialogue tasks."""

    def score(group: list[Row]) -> Interval:
        return perplexity(group, resamples=resamples, seed=seed)

    return _lines((record for record in records if record["nll"] is not None), score)


def print_headline(console: Console, records: Iterable[Row], *, resamples: int, seed: int) -> None:
    """Print what was measured, at most 100 columns wide."""
    records = list(records)
    scores = headline(records, resamples=resamples, seed=seed)
    losses = perplexity_headline(records, resamples=resamples, seed=seed)
    _print(console, scores, "mean score, %", 100)
    _print(console, losses, "perplexity of the given text", 1)


def _lines(
    records: Iterable[Row],
    score: Callable[[list[Row]], Interval],
    scores: Callable[[list[Row]], Scores] | None = None,
) -> list[Line]:
    records = list(records)
    policies = policy_groups(records)
    groups: dict[tuple[str, str], dict[str, list[Row]]] = {}
    for record in records:
        cells = groups.setdefault((record["protocol"], _label(record, policies)), {})
        cells.setdefault(record["budget_spec"] or FULL_COLUMN, []).append(record)
    methods = list(dict.fromkeys(label.removesuffix(PROTECTED) for _, label in groups))

    def order(key: tuple[str, str]) -> tuple[int, bool]:
        return methods.index(key[1].removesuffix(PROTECTED)), key[1].endswith(PROTECTED)

    return [
        Line(
            protocol=key[0],
            method=next(iter(groups[key].values()))[0]["method"],
            label=key[1],
            cells={budget: score(group) for budget, group in groups[key].items()},
            policies=_policies(groups[key].values()),
            scores={budget: scores(group) for budget, group in groups[key].items()}
            if scores else {},
            own_share=_share(groups[key].get(OWN, [])),
        )
        for key in sorted(groups, key=order)
    ]


def _label(record: Row, policies: Mapping[str | None, str]) -> str:
    """Name of a record's method, seeds of one policy together."""
    group = policies[record["policy"]]
    name = f"{record['method']}/{group}" if group else record["method"]
    label = method_label(name, record["variant"], record["allocator"])
    return f"{label}{PROTECTED if record['protected'] else ''}"


def _policies(groups: Iterable[list[Row]]) -> int:
    return len({record["policy"] for group in groups for record in group} - {None})


def _share(records: list[Row]) -> float | None:
    if not records:
        return None
    shares: list[float] = [record["kept_tokens"] / record["cached_tokens"] for record in records]
    return sum(shares) / len(shares)


def _print(console: Console, lines: list[Line], what: str, scale: int) -> None:
    for protocol in dict.fromkeys(line.protocol for line in lines):
        of_protocol = [line for line in lines if line.protocol == protocol]
        columns = sorted(
            {budget for line in of_protocol for budget in line.cells}, key=budget_order
        )
        table = _table(of_protocol, columns, scale, spread=True)
        fits = _width(console, table) <= console.width
        console.print(f"{protocol}: {what}{f' {SPREAD}' if fits else ''}")
        if not fits:
            table = _table(of_protocol, columns, scale, spread=False)
        console.print(table, width=max(console.width, _width(console, table)), crop=False)
    if lines:
        console.print("+p: first and last tokens are always kept")
    if any(line.policies > 1 for line in lines):
        console.print(SEVERAL_SEEDS)
    if any(line.policies == 1 for line in lines):
        console.print(ONE_SEED)
    if any(line.own_share is not None for line in lines):
        console.print("own @: the method's own size, as a share of the cache")


def _width(console: Console, table: Table) -> int:
    """Columns the table takes where nothing limits it."""
    return Measurement.get(console, console.options.update(max_width=10_000), table).maximum


def _table(lines: list[Line], columns: list[str], scale: int, *, spread: bool) -> Table:
    table = Table(box=None, pad_edge=False)
    table.add_column("method", no_wrap=True)
    for budget in columns:
        table.add_column(budget, justify="right", no_wrap=True)
    for line in lines:
        table.add_row(line.label, *(_cell(line, name, scale, spread=spread) for name in columns))
    return table


def budget_order(column: str) -> tuple[bool, bool, Decimal]:
    """Order of columns: shares, then token counts, each ascending; own sizes and full last."""
    if column in (OWN, FULL_COLUMN):
        return True, True, Decimal(column == FULL_COLUMN)
    budget = parse_budget(column)
    return False, budget.percent is None, budget.percent or Decimal(budget.count or 0)


def _cell(line: Line, column: str, scale: int, *, spread: bool) -> str:
    value = line.cells.get(column)
    if value is None:
        return ""
    half = (value.high - value.low) / 2 * scale
    digits = 0 if scale == 100 else 2
    size = f" @{line.own_share:.0%}" if column == OWN and line.own_share is not None else ""
    around = f" ±{half:.{digits}f}" if spread else ""
    return f"{value.mean * scale:.{digits}f}{around}{size}"
