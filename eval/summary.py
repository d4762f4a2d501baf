"""The end of a run: a table per protocol, and one sentence.

The table holds the mean score of every method and budget with its interval, the sentence what a
small cache costs by the best methods.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from functools import partial

from rich.console import Console
from rich.measure import Measurement
from rich.table import Table

from eval.nulls import Values, beats, best_values, prompt_values
from eval.results.records import (
    FULL,
    LEARNED,
    ORACLE,
    SELF_SIZED,
    Record,
    method_label,
    policy_groups,
)
from eval.stats import Interval, bootstrap_mean, per_prompt, perplexity
from kvp.budgets import parse_budget
from policies.registry import METHODS, NULLS

FULL_COLUMN = "full"
PROTECTED = " +p"
NO_BETTER = "°"
"""Behind a mean that is not above the best null's."""
SPREAD = "(± half of the 95 % interval)"
"""Shown next to each mean where the screen is wide enough."""
USUAL_BUDGET = "12.5%"
"""The budget the sentence is about where it was run; else the middle one of the run."""
NOT_COMPARED = (FULL, ORACLE, *NULLS)


@dataclass(frozen=True, kw_only=True)
class Line:
    """One method of one protocol: an estimate per budget."""

    protocol: str
    method: str
    """Name of the method alone."""
    label: str
    """Method, preset, allocator, and `+p` where first and last tokens are always kept."""
    cells: Mapping[str, Interval]
    """By budget spec; `full` for the full cache, `own` where the method sizes the cache."""
    compared: bool = False
    """Whether a null of the same protection was run."""
    no_better: frozenset[str] = frozenset()
    """Budgets at which it is not above the best null (`eval.nulls`)."""
    self_sized_share: float | None = None
    """Share of the cache it keeps where it sizes the cache itself, mean over records."""


def headline(records: Iterable[Record], *, resamples: int = 2000, seed: int = 0) -> list[Line]:
    """Mean string-match score over all generated tasks; policy seeds are averaged per prompt."""

    def score(group: list[Record]) -> Interval:
        return bootstrap_mean(per_prompt(group), resamples=resamples, seed=seed)

    above = partial(beats, resamples=resamples, seed=seed)
    return _lines((record for record in records if record["score"] is not None), score, above)


def perplexity_headline(
    records: Iterable[Record], *, resamples: int = 2000, seed: int = 0
) -> list[Line]:
    """Perplexity of the given replies over all dialogue tasks."""

    def score(group: list[Record]) -> Interval:
        return perplexity(group, resamples=resamples, seed=seed)

    above = partial(beats, resamples=resamples, seed=seed)
    return _lines((record for record in records if record["nll"] is not None), score, above)


def print_headline(
    console: Console, records: Iterable[Record], *, resamples: int, seed: int
) -> None:
    """Print what was measured, at most 100 columns wide."""
    records = list(records)
    scores = headline(records, resamples=resamples, seed=seed)
    losses = perplexity_headline(records, resamples=resamples, seed=seed)
    _print(console, scores, "mean score, %", 100)
    _print(console, losses, "perplexity of the given text", 1)


def _lines(
    records: Iterable[Record],
    score: Callable[[list[Record]], Interval],
    above: Callable[[Values, Values], bool],
) -> list[Line]:
    records = list(records)
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
        compared = {
            budget: prompt_values(group)
            for budget, group in groups[key].items()
            if first["method"] not in (FULL, *NULLS) and (*place, budget) in best
        }
        lines.append(
            Line(
                protocol=key[0],
                method=first["method"],
                label=key[1],
                cells={budget: score(group) for budget, group in groups[key].items()},
                compared=bool(compared),
                no_better=frozenset(
                    budget for budget, values in compared.items()
                    if not above(values, best[*place, budget])
                ),
                self_sized_share=_share(groups[key].get(SELF_SIZED, [])),
            )
        )  # fmt: skip
    return lines


def _best_nulls(records: Iterable[Record]) -> dict[tuple[str, bool, str], Values]:
    """Values of the best null by protocol, protection and budget."""
    nulls: dict[tuple[str, bool, str], dict[str, list[Record]]] = {}
    for record in records:
        if record["method"] in NULLS:
            key = record["protocol"], record["protected"], record["budget_spec"]
            name = method_label(record["method"], record["variant"], record["allocator"])
            nulls.setdefault(key, {}).setdefault(name, []).append(record)
    found = {key: best_values(map(prompt_values, by.values())) for key, by in nulls.items()}
    return {key: values for key, values in found.items() if values is not None}


def _label(record: Record, policies: Mapping[str | None, str]) -> str:
    """Name of a record's method, seeds of one policy together."""
    group = policies[record["policy"]]
    name = f"{record['method']}/{group}" if group else record["method"]
    label = method_label(name, record["variant"], record["allocator"])
    return f"{label}{PROTECTED if record['protected'] else ''}"


def _share(records: list[Record]) -> float | None:
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
    if any(line.compared for line in lines):
        names = dict.fromkeys(line.method for line in lines if line.method in NULLS)
        console.print(
            f"{NO_BETTER}: no better than the best null ({', '.join(names)}) with the same "
            "protection, by the 95 % interval of the paired difference"
        )
    if any(line.self_sized_share is not None for line in lines):
        console.print("own @: the size that the method chose, as a share of the cache")


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
    """Order of columns: shares, then token counts, each ascending; self-sized and full last."""
    if column in (SELF_SIZED, FULL_COLUMN):
        return True, True, Decimal(column == FULL_COLUMN)
    budget = parse_budget(column)
    return False, budget.percent is None, budget.percent or Decimal(budget.count or 0)


def _cell(line: Line, column: str, scale: int, *, spread: bool) -> str:
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
    around = f" ±{half:.{digits}f}" if spread else ""
    mark = NO_BETTER if column in line.no_better else ""
    return f"{value.mean * scale:.{digits}f}{around}{mark}{size}"


def conclusion(records: Iterable[Record], *, resamples: int = 200, seed: int = 0) -> str:
    """One sentence on the results of the first protocol with generated answers.

    Where nothing was generated it is about perplexity; without methods to compare it is empty.
    "Best" is by the mean over the prompts of this very run.
    """
    records = list(records)
    scores = headline(records, resamples=resamples, seed=seed)
    if scores:
        return _sentence(scores, losses=False)
    return _sentence(perplexity_headline(records, resamples=resamples, seed=seed), losses=True)


def _sentence(lines: Sequence[Line], *, losses: bool) -> str:
    protocol = next((line.protocol for line in lines), None)
    lines = [line for line in lines if line.protocol == protocol]
    full = next((line.cells[FULL_COLUMN].mean for line in lines if FULL_COLUMN in line.cells), None)
    compared = [line for line in lines if line.method not in NOT_COMPARED]
    budgets = {name for line in compared for name in line.cells} - {FULL_COLUMN, SELF_SIZED}
    if not budgets:
        return ""
    ordered = sorted(budgets, key=budget_order)
    budget = USUAL_BUDGET if USUAL_BUDGET in budgets else ordered[len(ordered) // 2]
    compared = [line for line in compared if budget in line.cells]

    def value(line: Line) -> float:
        return -line.cells[budget].mean if losses else line.cells[budget].mean

    def best(some: Sequence[Line]) -> Line | None:
        return max(some, key=value, default=None)

    learned = best([line for line in compared if line.method == LEARNED])
    others = [line for line in compared if line.method != LEARNED]
    other = best(others)
    free = best([line for line in others if _attention_free(line.method)])
    parts = []
    if learned:
        parts.append((learned.label, learned))
    if free and free is not other:
        parts.append((f"the best attention-free method without training, {free.label},", free))
    if other:
        parts.append((f"the best method without training, {other.label},", other))
    null = best([line for line in lines if line.method in NULLS and budget in line.cells])
    if null:
        parts.append((f"the best null, {null.label},", null))
    verb, unit = _words(full, losses=losses)
    numbers = [_number(line.cells[budget].mean, full, losses=losses) for _, line in parts]
    text = f"{parts[0][0]} {verb} {numbers[0]}{unit}"
    for (name, _), number in zip(parts[1:], numbers[1:], strict=True):
        text += f"; {name} {number}"
    where = f"At {budget} of the cache" if budget.endswith("%") else f"At {budget} tokens per head"
    protocol_words = "the question seen" if protocol == "query_aware" else "the question not seen"
    return f"{where} ({protocol_words} before compression) {text}."


def _attention_free(method: str) -> bool:
    entry = METHODS.get(method)
    return entry is not None and entry.attention_free


def _words(full: float | None, *, losses: bool) -> tuple[str, str]:
    """Text before and after the first number."""
    if losses:
        relative = " times the perplexity of the full cache" if full else " as its perplexity"
        return "has", relative
    return ("answers", " of what the full cache answers") if full else ("scores", "")


def _number(mean: float, full: float | None, *, losses: bool) -> str:
    """Relative to the full cache where that was run."""
    relative = mean / full if full else mean
    return f"{relative:.2f}" if losses else f"{relative:.0%}"
