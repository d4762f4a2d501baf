"""Differences of two results folders, paired by prompt: second minus first.

Methods are compared with themselves: the same method, preset, allocator and protection, at the same
budget and protocol, on prompts that both folders answered. Policies are compared by their names
without the training seed; where each folder has one policy, these two are compared.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table

from eval.comparison import ReportedMethod, budget_order, method_of
from eval.config import CompareConfig
from eval.records import FULL, Record, policy_groups, results_folder
from eval.results import Results, load_results
from eval.stats import (
    Interval,
    Scores,
    bootstrap_mean,
    holm,
    paired_difference,
    prompt_values,
    prompts_of,
)
from kvp.artifacts.files import atomic_write_text
from kvp.errors import ResultsError

LIKELIHOOD = "log-likelihood of given replies, nats per token"
ANSWERS = "answers, %"


@dataclass(frozen=True, kw_only=True)
class Row:
    """One method at one budget."""

    kind: str
    """`ANSWERS` or `LIKELIHOOD`."""
    protocol: str
    method: str
    budget: str
    first: Interval
    second: Interval
    difference: Interval
    """Second minus first, with its p-value."""
    resolved: bool = False
    """Differs from 0 after Holm's correction over all rows of its kind."""


Curves = Mapping[tuple[str, str, ReportedMethod], Mapping[str, Scores]]
"""(kind, protocol, method) -> budget, or `FULL` -> values."""


def run(config: CompareConfig) -> list[Row]:
    """Print the tables and write the CSV file; returns the rows.

    Raises ResultsError where a folder cannot be read, or both share no prompt, or hold answers to
    different prompts of one name.
    """
    folders = [load_results(results_folder(path)) for path in (config.first, config.second)]
    check_prompts(*folders)
    first, second = map(curves_of, folders)
    rows = differences(first, second, resamples=config.bootstrap, seed=config.seed)
    if not rows:
        raise ResultsError(
            f"{config.first} and {config.second} have no method in common that was run "
            "at the same budget under the same protocol; kvp-eval adds to a folder what it lacks"
        )
    for table in _tables(rows):
        Console(markup=False).print(table)
    print(_legend(config))
    if config.out is not None:
        atomic_write_text(Path(config.out), _csv(rows))
        print(f"written: {config.out}")
    return rows


def check_prompts(first: Results, second: Results) -> None:
    """Raise ResultsError unless both answered some of the same prompts, and none differs."""
    prompts = [_prompts(each.records) for each in (first, second)]
    shared = prompts[0].keys() & prompts[1].keys()
    if not shared:
        raise ResultsError(
            f"{first.folder} and {second.folder} have no prompt in common: run both with the same "
            "--tasks, --split, --seed and data (prompts of files are called after the file)"
        )
    for task, example in sorted(shared):
        ours, theirs = prompts[0][task, example], prompts[1][task, example]
        for what, mine, other in zip(_SAME, ours, theirs, strict=True):
            if mine != other:
                why = "scored otherwise" if what == "metric" else "answers to different prompts"
                raise ResultsError(
                    f"prompt {example} of {task} has another {what} in {second.folder} ({other}) "
                    f"than in {first.folder} ({mine}): these are {why}"
                )


_SAME = ("length", "metric", "digest")
"""What the records of a prompt must agree in."""


def _prompts(records: Iterable[Record]) -> dict[tuple[str, str], tuple[object, ...]]:
    fields = ("length", "metric", "prompt_digest")
    return {
        (record["task"], record["example"]): tuple(record[name] for name in fields)
        for record in records
    }


def curves_of(results: Results) -> Curves:
    """Values per prompt of every method at every budget."""
    groups = policy_groups(results.records)
    records: dict[tuple[str, str, ReportedMethod], dict[str, list[Record]]] = {}
    for record in results.records:
        kind = ANSWERS if record["nll"] is None else LIKELIHOOD
        key = kind, record["protocol"], method_of(record, groups)
        records.setdefault(key, {}).setdefault(record["budget_spec"] or FULL, []).append(record)
    return {
        key: {budget: prompt_values(group) for budget, group in by_budget.items()}
        for key, by_budget in records.items()
    }


def differences(first: Curves, second: Curves, *, resamples: int, seed: int) -> list[Row]:
    """Rows of all that both have, methods and protocols in the order of the first."""
    rows = []
    for key, ours in first.items():
        theirs = second.get(key, {})
        shared = [budget for budget in ours if budget in theirs]
        sides = [{budget: side[budget] for budget in shared} for side in (ours, theirs)]
        budgets = sorted((each for each in shared if each != FULL), key=budget_order)
        for budget in ([FULL] if FULL in shared else []) + budgets:
            pair = [side[budget] for side in sides]
            rows += _row(key, budget, pair, resamples=resamples, seed=seed)
    return _marked(rows)


def _row(
    key: tuple[str, str, ReportedMethod],
    budget: str,
    pair: Sequence[Scores],
    *,
    resamples: int,
    seed: int,
) -> list[Row]:
    """One row over the prompts that both answered; none without any."""
    shared = prompts_of(pair[0]) & prompts_of(pair[1])
    if not shared:
        return []
    kind, protocol, method = key
    first, second = (
        {
            policy: {unit: value for unit, value in values.items() if unit in shared}
            for policy, values in side.items()
        }
        for side in pair
    )
    answers = kind == ANSWERS
    means = [
        bootstrap_mean(side, bounds=(0, 1) if answers else None, resamples=resamples, seed=seed)
        for side in (first, second)
    ]
    gap = paired_difference(
        second, first, bounds=(-1, 1) if answers else None, resamples=resamples, seed=seed
    )
    return [
        Row(
            kind=kind, protocol=protocol, method=_name(method), budget=budget,
            first=means[0], second=means[1], difference=gap,
        )
    ]  # fmt: skip


def _marked(rows: Sequence[Row]) -> list[Row]:
    marked: list[Row] = []
    for kind in dict.fromkeys(row.kind for row in rows):
        same = [row for row in rows if row.kind == kind]
        stars = holm([row.difference for row in same])
        marked += [replace(row, resolved=star) for row, star in zip(same, stars, strict=True)]
    return marked


def _name(method: ReportedMethod) -> str:
    return f"{method.family} ({method.details})" if method.details else method.family


def _tables(rows: Sequence[Row]) -> list[Table]:
    tables = []
    for kind, protocol in dict.fromkeys((row.kind, row.protocol) for row in rows):
        title = f"{kind}, {protocol}"
        table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
        table.add_column("method, budget", overflow="fold")
        for name in ("first", "second", "second - first (95 %)"):
            table.add_column(name, justify="right", no_wrap=True)
        factor, digits = (100, 1) if kind == ANSWERS else (1, 3)
        same = [row for row in rows if (row.kind, row.protocol) == (kind, protocol)]
        for method, of_method in groupby(same, key=lambda row: row.method):
            table.add_row(method)
            for row in of_method:
                gap = row.difference
                table.add_row(
                    f"  {row.budget}",
                    *(f"{factor * side.mean:.{digits}f}" for side in (row.first, row.second)),
                    f"{factor * gap.mean:+.{digits}f} ({factor * gap.low:+.{digits}f} to "
                    f"{factor * gap.high:+.{digits}f}) {'*' if row.resolved else ' '}",
                )
        tables.append(table)
    return tables


def _legend(config: CompareConfig) -> str:
    return (
        f"first: {config.first}; second: {config.second}. Paired by prompt. * differs from 0 at "
        "5 %, corrected for all rows of its table (Holm)."
    )


def _csv(rows: Sequence[Row]) -> str:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    sides = ("first", "second", "difference")
    columns = [f"{side}{part}" for side in sides for part in ("", "_low", "_high")]
    writer.writerow(["kind", "protocol", "method", "budget", "prompts", *columns, "p", "resolved"])
    for row in rows:
        numbers = [
            f"{number:.6g}"
            for side in (row.first, row.second, row.difference)
            for number in (side.mean, side.low, side.high)
        ]
        p = "" if row.difference.p is None else f"{row.difference.p:.3g}"
        writer.writerow(
            [row.kind, row.protocol, row.method, row.budget, row.difference.prompts, *numbers, p,
             int(row.resolved)]
        )  # fmt: skip
    return text.getvalue()
