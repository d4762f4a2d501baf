"""The table a run ends with: every head against chance, the oracle and the best heuristic."""

from __future__ import annotations

from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table
from torch import Tensor

from kvp.geometry import Geometry
from train.validation import HeldOut

SHOWN_BUDGETS = ("12.5%", "25%", "50%")
"""Budgets that fit beside the rest into 80 columns; the policy's file has all of them."""


def print_summary(
    result: HeldOut, best_step: Tensor, geometry: Geometry, heads: range | None = None
) -> None:
    """Print what every head's policy is worth, and where it loses to a heuristic.

    Args:
        result: held-out metrics of the exported weights, heuristics included (`judge`).
        best_step: [A] int64 step the exported weights of every head come from.
        geometry: layers and heads, for the labels.
        heads: which heads of the model the result is about, None for all.
    """
    names = head_names(geometry, heads)
    table = Table(
        title=f"{result.contexts} held-out contexts; budgets: share of the attention lost there",
        caption=(
            "skill in keeping attention: 0 chance, 1 ideal; "
            "excess: lost beyond the oracle, mean over budgets"
        ),
        box=SIMPLE,
        padding=(0, 1, 0, 0),
        pad_edge=False,
    )
    for column in ("head", "skill", "excess", *SHOWN_BUDGETS):
        table.add_column(column, justify="right")
    for column in ("best heuristic", "params", "step"):
        table.add_column(column, justify="right", no_wrap=True)
    columns = [result.skill, result.excess, *(result.lost[budget] for budget in SHOWN_BUDGETS)]
    best = result.best_baselines()
    for agent, name in enumerate(names):
        numbers = [f"{float(column[agent]):.3f}" for column in columns]
        rival = best[agent]
        known = "" if rival is None else f"{rival[0]} {rival[1]:.3f}"
        step = str(int(best_step[agent]))
        table.add_row(name, *numbers, known, f"{result.parameters:,}", step)
    table.add_section()
    means = [f"{float(column.nanmean()):.3f}" for column in columns]
    baselines = [rival[1] for rival in best if rival is not None]
    mean = f"{sum(baselines) / len(baselines):.3f}" if baselines else ""
    table.add_row("all", *means, mean, "", "")
    console = Console()
    console.print(table)
    if result.baselines is not None:
        console.print(verdict(result, names), highlight=False, markup=False)


def head_names(geometry: Geometry, heads: range | None = None) -> list[str]:
    """What heads are called, LAYER.HEAD, counted from 0."""
    places = range(geometry.agents) if heads is None else heads
    return [f"{place // geometry.kv_heads}.{place % geometry.kv_heads}" for place in places]


def verdict(result: HeldOut, names: list[str]) -> str:
    """Which heads the policy loses to the best heuristic on, in one sentence; names are [A]."""
    best, beaten = result.best_baselines(), result.beaten()
    judged = sum(rival is not None for rival in best)
    if not judged:
        return "No head saw tokens that differ: nothing to compare with heuristics."
    if not beaten:
        return f"The policy beats the best attention-free heuristic on all {judged} heads."
    lost = []
    for agent in beaten:
        rival = best[agent]
        assert rival is not None, "nothing beats a policy that is not compared"
        own = float(result.skill[agent])
        lost.append(f"{names[agent]} ({rival[0]} {rival[1]:.3f} > {own:.3f})")
    return (
        f"The policy loses to the best attention-free heuristic on {len(beaten)} of {judged} "
        f"heads: {', '.join(lost)}."
    )
