"""The table at the end of kvp evolve, from the budget file alone."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from policies.budget_files import BudgetFile


def print_budgets(budgets: BudgetFile, console: Console | None = None) -> None:
    """Print counts, and how they scored."""
    console = Console() if console is None else console
    table = Table("budget", "of", f"tokens per {budgets.level}", box=None)
    for column in table.columns[:2]:
        column.justify = "right"
    for point in budgets.points:
        table.add_row(str(point.budget), str(point.cached_tokens), _counts(budgets, point.counts))
    console.print(table)
    if budgets.made_by.get("kind") == "curves":
        console.print(_losses(budgets))
        return
    made = budgets.made_by
    result = Table("prompts", "", "uniform", "evolved", "difference (95 %)", box=None)
    result.add_row(
        str(budgets.data["prompts"]), "searched on", _number(made["uniform"]["score"]),
        _number(made["elite"]["score"]), "",
    )  # fmt: skip
    held_out = budgets.held_out
    if held_out is not None:
        low, high = held_out["interval"]
        result.add_row(
            str(held_out["prompts"]), "held out", _number(held_out["uniform"]),
            _number(held_out["score"]),
            f"{held_out['difference']:+.4f} ({low:+.4f} to {high:+.4f})",
        )  # fmt: skip
    console.print(result)
    console.print(
        f"fitness {made['uniform']['fitness']:.4f} -> {made['elite']['fitness']:.4f}; "
        f"{made['evaluations']} schemes evaluated in {made['seconds']:.0f} s",
        highlight=False,
    )
    if held_out is not None and low <= 0:
        console.print(
            "note: on held-out prompts the interval includes 0: not shown to beat uniform",
            highlight=False, soft_wrap=True,
        )  # fmt: skip


def _counts(budgets: BudgetFile, counts: tuple[int, ...]) -> str:
    """Counts in one line: layers apart by spaces, heads of a layer by slashes."""
    width = budgets.kv_heads if budgets.level == "head" else 1
    layers = [counts[start : start + width] for start in range(0, len(counts), width)]
    return " ".join("/".join(map(str, layer)) for layer in layers)


def _losses(budgets: BudgetFile) -> Table:
    table = Table("budget", "attention lost, uniform", "chosen", box=None)
    for point, loss in zip(budgets.points, budgets.made_by["expected_loss"], strict=True):
        table.add_row(str(point.budget), _number(loss["uniform"]), _number(loss["chosen"]))
    return table


def _number(value: float) -> str:
    return f"{value:.4f}"
