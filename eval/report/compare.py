"""One comparison: everything of one kind (accuracy, perplexity, kept attention), one protocol."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from eval.report.aggregates import (
    FULL,
    LEARNED,
    ORACLE,
    Budgets,
    Grid,
    budget_axis,
    kept_grid,
    perplexity_grid,
    score_grid,
)
from eval.report.best_settings import Choice, choose
from eval.report.load import Results
from eval.results.records import Row, policy_groups

Kind = Literal["accuracy", "perplexity", "kept"]
"""Scores of answers, likelihood of given replies, future attention kept on traces."""

PROTOCOLS = {
    "query_aware": "query_aware, the question is seen at compression",
    "query_agnostic": "query_agnostic, the question is not seen at compression",
}
"""Protocols in words."""


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Numbers of one kind under one protocol."""

    kind: Kind
    protocol: str
    budgets: Budgets
    grid: Grid
    """All tasks together."""
    tasks: Mapping[str, Grid]
    """Task by task; empty for traces."""
    higher_is_better: bool
    choices: Mapping[str, Choice]
    """Setting shown for each method, by family, in the order to show them."""
    conditions: str
    """n, split, seeds, protection and protocol, for captions."""


def compare(
    results: Results, kind: Kind, protocol: str, *, validation: Results | None, resamples: int
) -> Comparison | None:
    """Compare all methods of a results folder; None where it has no such rows."""
    rows = select(results, kind, protocol)
    if not any(row["budget_spec"] for row in rows):
        return None
    groups = policy_groups([*results.rows, *results.kept])
    grid = _grid(kind, rows, groups, resamples)
    tasks: dict[str, Grid] = {
        name: _grid(kind, [row for row in rows if row["task"] == name], groups, resamples)
        for name in dict.fromkeys(row["task"] for row in rows if "task" in row)
    }
    validating = None
    if validation is not None:
        chosen = select(validation, kind, protocol)
        others = policy_groups([*validation.rows, *validation.kept])
        validating = _grid(kind, chosen, others, 1)
    choices = choose(grid, higher_is_better=kind != "perplexity", validation=validating or None)
    return Comparison(
        kind=kind,
        protocol=protocol,
        budgets=budget_axis(rows),
        grid=grid,
        tasks=tasks,
        higher_is_better=kind != "perplexity",
        choices={family: choices[family] for family in in_order(list(choices))},
        conditions=_conditions(results, kind, rows, grid, choices, protocol),
    )


def select(results: Results, kind: Kind, protocol: str) -> list[Row]:
    """Rows of one kind and protocol."""
    if kind == "kept":
        return [row for row in results.kept if row["protocol"] == protocol]
    field = "score" if kind == "accuracy" else "nll"
    return [row for row in results.rows if row["protocol"] == protocol and row[field] is not None]


def _grid(
    kind: Kind, rows: Sequence[Row], groups: Mapping[str | None, str], resamples: int
) -> Grid:
    if kind == "kept":
        return kept_grid(rows, groups)
    measure = score_grid if kind == "accuracy" else perplexity_grid
    return measure(rows, groups, resamples=resamples)


def in_order(families: Sequence[str]) -> list[str]:
    """Full cache, oracle, learned policies, then the others as they came."""
    first = (FULL, ORACLE, LEARNED)

    def place(family: str) -> int:
        method = family.partition("/")[0]
        return first.index(method) if method in first else len(first)

    return sorted(families, key=place)


def _conditions(
    results: Results,
    kind: Kind,
    rows: Sequence[Row],
    grid: Grid,
    choices: Mapping[str, Choice],
    protocol: str,
) -> str:
    said = f"{PROTOCOLS.get(protocol, protocol)}; {_protection(results, choices)}"
    if kind == "kept":
        sequences = "/".join(str(n) for n in sorted({row["sequences"] for row in rows}))
        return (
            f"n = {sequences} held-out sequences, seed {results.setting('seed')}"
            f"{policy_words(rows, 'averaged')}; {said}"
        )
    prompts = {(row["task"], row["example"]) for row in rows}
    sizes = [sum(unit[0] == task for unit in prompts) for task in {task for task, _ in prompts}]
    per_task = f"{min(sizes)}" if min(sizes) == max(sizes) else f"{min(sizes)} to {max(sizes)}"
    answered = {cell.interval.prompts for cells in grid.values() for cell in cells.values()}
    fewer = "" if len(answered) == 1 else f", unfinished cells with {min(answered)} or more"
    spread = f" ({per_task} per task{fewer})" if len(sizes) > 1 else fewer
    return (
        f"n = {len(prompts)} prompts{spread}, "
        f"split {results.setting('split')}, prompt seed {results.setting('seed')}"
        f"{policy_words(rows, 'averaged per prompt')}; {said}"
    )


def policy_words(rows: Sequence[Row], averaged: str) -> str:
    """The policies that occur in rows, as part of a caption; empty where there are none."""
    labels = list(dict.fromkeys(row["policy"] for row in rows if row["policy"] is not None))
    if len(labels) < 2:
        return f"; policy {labels[0]}" if labels else ""
    return f"; policies {', '.join(labels)}, {averaged}"


def _protection(results: Results, choices: Mapping[str, Choice]) -> str:
    kept = (
        f"protected = first {results.setting('sinks')} and last {results.setting('recents')} "
        "tokens always kept"
    )
    if all(choice.settings == 1 for choice in choices.values()):
        return kept
    if all(choice.validated for choice in choices.values() if choice.settings > 1):
        return f"{kept}, the setting of each method chosen on validation prompts"
    return (
        f"{kept}, each method in the best of its settings (presets, allocators, with and without "
        "protection) over the whole curve on these prompts"
    )
