"""Differences of two results folders, paired by prompt: second minus first.

Methods are compared with themselves: the same method, preset, allocator and protection, at the same
budget and protocol, on prompts that both folders answered. Policies are compared by their names
without the training seed; where each folder has one policy, these two are compared.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby
from pathlib import Path

import pandas
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
    Unit,
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
    print(
        f"first: {config.first}; second: {config.second}. Paired by prompt. * differs from 0 at "
        "5 %, corrected for all rows of its table (Holm)."
    )
    if config.out is not None:
        atomic_write_text(Path(config.out), _csv(rows))
        print(f"written: {config.out}")
    return rows


def check_prompts(first: Results, second: Results) -> None:
    """Raise ResultsError unless both answered some of the same prompts, and none differs."""
    prompts = [
        {(record["task"], record["example"]): record for record in each.records}
        for each in (first, second)
    ]
    shared = prompts[0].keys() & prompts[1].keys()
    if not shared:
        raise ResultsError(
            f"{first.folder} and {second.folder} have no prompt in common: run both with the same "
            "--tasks, --split, --seed and data (prompts of files are called after the file)"
        )
    for task, example in sorted(shared):
        for field in ("length", "metric", "prompt_digest"):
            ours, theirs = (each[task, example][field] for each in prompts)
            if ours != theirs:
                why = "scored otherwise" if field == "metric" else "answers to different prompts"
                raise ResultsError(
                    f"prompt {example} of {task} has another {field} in {second.folder} ({theirs}) "
                    f"than in {first.folder} ({ours}): these are {why}"
                )


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
    """Rows of all that both have on shared prompts, methods and protocols in the first's order."""
    rows = []
    for (kind, protocol, method), ours in first.items():
        bounds = (0, 1) if kind == ANSWERS else None
        mean = partial(bootstrap_mean, bounds=bounds, resamples=resamples, seed=seed)
        theirs = second.get((kind, protocol, method), {})
        budgets = sorted(
            ours.keys() & theirs.keys(), key=lambda each: (each != FULL, budget_order(each))
        )
        for budget in budgets:
            shared = prompts_of(ours[budget]) & prompts_of(theirs[budget])
            sides = [_among(side[budget], shared) for side in (ours, theirs)]
            if shared:
                rows.append(
                    Row(
                        kind=kind,
                        protocol=protocol,
                        method=f"{method.family} ({method.details})" if method.details else FULL,
                        budget=budget,
                        first=mean(sides[0]),
                        second=mean(sides[1]),
                        difference=paired_difference(
                            sides[1],
                            sides[0],
                            bounds=bounds and (-1, 1),
                            resamples=resamples,
                            seed=seed,
                        ),
                    )
                )
    marked: list[Row] = []
    for kind in dict.fromkeys(row.kind for row in rows):
        same = [row for row in rows if row.kind == kind]
        stars = holm([row.difference for row in same])
        marked += [replace(row, resolved=star) for row, star in zip(same, stars, strict=True)]
    return marked


def _among(scores: Scores, prompts: set[Unit]) -> Scores:
    return {
        policy: {unit: value for unit, value in values.items() if unit in prompts}
        for policy, values in scores.items()
    }


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


def _csv(rows: Sequence[Row]) -> str:
    lines = [
        {
            "kind": row.kind, "protocol": row.protocol, "method": row.method,
            "budget": row.budget, "prompts": row.difference.prompts,
            **{
                f"{side}{part}": number
                for side in ("first", "second", "difference")
                for one in (getattr(row, side),)
                for part, number in (("", one.mean), ("_low", one.low), ("_high", one.high))
            },
            "p": row.difference.p, "resolved": int(row.resolved),
        }
        for row in rows
    ]  # fmt: skip
    return str(pandas.DataFrame(lines).to_csv(index=False, float_format="%.6g"))
