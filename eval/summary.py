"""The end of a run: a table per protocol, and a few sentences.

The table holds the mean score of every method and budget with its interval, the sentences what a
small cache costs by the best methods, and which differences the prompts can tell.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from decimal import Decimal

from rich.console import Console
from rich.measure import Measurement
from rich.table import Table

from eval.results.records import (
    FULL,
    LEARNED,
    ORACLE,
    SELF_SIZED,
    Record,
    method_label,
    policy_groups,
)
from eval.stats import (
    Interval,
    Scores,
    bootstrap_mean,
    by_policy,
    holm,
    paired_difference,
    perplexity,
    prompts_to_resolve,
    resolved_by,
    smallest_resolved,
)
from kvp.budgets import parse_budget
from policies.registry import METHODS

FULL_COLUMN = "full"
PROTECTED = " +p"
SPREAD = "(± half of the 95 % interval)"
"""Shown next to each mean where the screen is wide enough."""
SEVERAL_SEEDS = "kvp: intervals are over prompts and training seeds"
ONE_SEED = "kvp, one training seed: what another seed would change is not in the interval"

USUAL_BUDGET = "12.5%"
"""The budget the sentences are about where it was run; else the middle one of the run."""
NOT_COMPARED = (FULL, ORACLE, "random")
WORST_SD = 0.5**0.5
"""Standard deviation of a paired difference of two methods that answer half of the prompts each,
independently of each other."""
WANTED = 0.05
"""Difference of mean scores that a dry run says the number of prompts for."""


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
    policies: int
    """Policies averaged, 0 for methods without."""
    scores: Mapping[str, Scores] = field(default_factory=dict)
    """By budget, what the means are over; empty for perplexities."""
    self_sized_share: float | None = None
    """Share of the cache it keeps where it sizes the cache itself, mean over records."""


def headline(records: Iterable[Record], *, resamples: int = 2000, seed: int = 0) -> list[Line]:
    """Mean string-match score over all generated tasks, policy seeds averaged."""

    def score(group: list[Record]) -> Interval:
        return bootstrap_mean(by_policy(group), resamples=resamples, seed=seed)

    return _lines((record for record in records if record["score"] is not None), score, by_policy)


def perplexity_headline(
    records: Iterable[Record], *, resamples: int = 2000, seed: int = 0
) -> list[Line]:
    """Perplexity of the given replies over all dialogue tasks."""

    def score(group: list[Record]) -> Interval:
        return perplexity(group, resamples=resamples, seed=seed)

    return _lines((record for record in records if record["nll"] is not None), score)


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
    scores: Callable[[list[Record]], Scores] | None = None,
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

    return [
        Line(
            protocol=key[0],
            method=next(iter(groups[key].values()))[0]["method"],
            label=key[1],
            cells={budget: score(group) for budget, group in groups[key].items()},
            policies=_policies(groups[key].values()),
            scores={budget: scores(group) for budget, group in groups[key].items()}
            if scores
            else {},
            self_sized_share=_share(groups[key].get(SELF_SIZED, [])),
        )
        for key in sorted(groups, key=order)
    ]


def _label(record: Record, policies: Mapping[str | None, str]) -> str:
    """Name of a record's method, seeds of one policy together."""
    group = policies[record["policy"]]
    name = f"{record['method']}/{group}" if group else record["method"]
    label = method_label(name, record["variant"], record["allocator"])
    return f"{label}{PROTECTED if record['protected'] else ''}"


def _policies(groups: Iterable[list[Record]]) -> int:
    return len({record["policy"] for group in groups for record in group} - {None})


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
    if any(line.policies > 1 for line in lines):
        console.print(SEVERAL_SEEDS)
    if any(line.policies == 1 for line in lines):
        console.print(ONE_SEED)
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
    around = f" ±{half:.{digits}f}" if spread and half else ""  # of one text there is no interval
    return f"{value.mean * scale:.{digits}f}{around}{size}"


@dataclass(frozen=True, kw_only=True)
class Best:
    """The best methods of one protocol at one budget."""

    protocol: str
    budget: str
    full: float | None
    """Mean of the full cache."""
    learned: Line | None
    attention_free: Line | None
    """Of the methods without training; None where that is `other`."""
    other: Line | None
    """The best method without training."""

    @property
    def lines(self) -> list[Line]:
        """Those that there are, the learned one first."""
        return [line for line in (self.learned, self.attention_free, self.other) if line]


def conclusion(records: Iterable[Record], *, resamples: int = 200, seed: int = 0) -> str:
    """A few sentences on the results of the first protocol with generated answers.

    Where nothing was generated it is about perplexity; without methods to compare it is empty.
    "Best" is by the mean over the prompts of this very run.
    """
    records = list(records)
    scores = headline(records, resamples=resamples, seed=seed)
    lines = scores or perplexity_headline(records, resamples=resamples, seed=seed)
    best = _best(lines, losses=not scores)
    if best is None:
        return ""
    sentence = _sentence(best, losses=not scores)
    return "\n".join([sentence, *_differences(best, resamples=resamples, seed=seed)])


def planned_resolution(tasks: Iterable[str]) -> str:
    """What differences can be shown by prompts of these tasks, one entry per prompt.

    For the worst case of two unrelated methods; empty without prompts.
    """
    sizes = Counter(tasks).values()
    if not sizes:
        return ""
    effective = len(sizes) ** 2 / sum(1 / size for size in sizes)  # every task weighs the same
    smallest = min(1.0, smallest_resolved(WORST_SD, effective))
    enough = math.ceil(prompts_to_resolve(WORST_SD, WANTED) / len(sizes))
    return (
        f"with {'/'.join(map(str, sorted(set(sizes))))} prompts per task differences below "
        f"{100 * smallest:.0f} points are not resolved between "
        f"unrelated methods; {100 * WANTED:.0f} points need {enough} per task"
    )


def _best(lines: Sequence[Line], *, losses: bool) -> Best | None:
    protocol = next((line.protocol for line in lines), "")
    lines = [line for line in lines if line.protocol == protocol]
    full = next((line.cells[FULL_COLUMN].mean for line in lines if FULL_COLUMN in line.cells), None)
    compared = [line for line in lines if line.method not in NOT_COMPARED]
    budgets = {name for line in compared for name in line.cells} - {FULL_COLUMN, SELF_SIZED}
    if not budgets:
        return None
    ordered = sorted(budgets, key=budget_order)
    budget = USUAL_BUDGET if USUAL_BUDGET in budgets else ordered[len(ordered) // 2]
    compared = [line for line in compared if budget in line.cells]

    def value(line: Line) -> float:
        return -line.cells[budget].mean if losses else line.cells[budget].mean

    def best(some: Sequence[Line]) -> Line | None:
        return max(some, key=value, default=None)

    others = [line for line in compared if line.method != LEARNED]
    other = best(others)
    free = best([line for line in others if _attention_free(line.method)])
    return Best(
        protocol=protocol,
        budget=budget,
        full=full,
        learned=best([line for line in compared if line.method == LEARNED]),
        attention_free=None if free is other else free,
        other=other,
    )


def _sentence(best: Best, *, losses: bool) -> str:
    budget, full = best.budget, best.full
    names = {
        id(best.learned): "{}",
        id(best.attention_free): "the best attention-free method without training, {},",
        id(best.other): "the best method without training, {},",
    }
    parts = [(names[id(line)].format(line.label), line.cells[budget].mean) for line in best.lines]
    verb, unit = _words(full, losses=losses)
    numbers = [_number(mean, full, losses=losses) for _, mean in parts]
    text = f"{parts[0][0]} {verb} {numbers[0]}{unit}"
    for (name, _), number in zip(parts[1:], numbers[1:], strict=True):
        text += f"; {name} {number}"
    where = f"At {budget} of the cache" if budget.endswith("%") else f"At {budget} tokens per head"
    seen = "the question seen" if best.protocol == "query_aware" else "the question not seen"
    return f"{where} ({seen} before compression) {text}."


def _differences(best: Best, *, resamples: int, seed: int) -> list[str]:
    """The first of the methods minus the others, and what size of difference was to be seen.

    Nothing where they were not scored (perplexities), or share no prompts.
    """
    first, budget = best.lines[0], best.budget
    pairs = [
        (line, first.scores[budget], line.scores[budget])
        for line in best.lines[1:]
        if line.scores and _share_prompts(first, line, budget)
    ]
    if not pairs:
        return []
    gaps = [
        paired_difference(ours, theirs, resamples=resamples, seed=seed) for _, ours, theirs in pairs
    ]
    parts = [
        f"minus {line.label} {100 * difference.mean:+.1f} "
        f"({100 * difference.low:+.1f} to {100 * difference.high:+.1f})"
        f"{' *' if resolved else ''}"
        for (line, _, _), difference, resolved in zip(pairs, gaps, holm(gaps), strict=True)
    ]
    last = gaps[-1]
    tasks = {task for answers in pairs[-1][1].values() for task, _ in answers}
    each = round(last.prompts / len(tasks))
    return [
        f"Paired by prompt, in points (95 % interval): {first.label} {', '.join(parts)}.",
        "* differs from 0 at 5 %, corrected for the number of differences (Holm)."
        if any(holm(gaps))
        else "None of these differences can be told from 0 with these prompts.",
        f"With {each} prompt{'s' * (each != 1)} per task, differences below "
        f"{100 * min(1.0, resolved_by(last)):.0f} points are not resolved.",
    ]


def _share_prompts(first: Line, second: Line, budget: str) -> bool:
    ours, theirs = (
        {unit for answers in line.scores[budget].values() for unit in answers}
        for line in (first, second)
    )
    return not ours.isdisjoint(theirs)


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
