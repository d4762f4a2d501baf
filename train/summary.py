"""The table a run ends with: every head against chance and against the oracle."""

from __future__ import annotations

from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table
from torch import Tensor

from kvp.geometry import Geometry
from train.held_out import HeldOut


def print_summary(result: HeldOut, best_step: Tensor, geometry: Geometry) -> None:
    """Print skill, area under the cost curve and lost attention of every head to standard output.

    Args:
        result: held-out metrics of the exported weights.
        best_step: [A] int64 step the exported weights of every head come from.
        geometry: layers and heads, for the labels.
    """
    title = f"{result.contexts} held-out contexts; area and budgets: share of the attention lost"
    table = Table(title=title, box=SIMPLE)
    for column in ("head", "skill", "area", "oracle", "ratio", *result.lost, "step"):
        table.add_column(column, justify="right")
    columns = [result.skill, result.area, result.oracle_area, result.area / result.oracle_area]
    columns += result.lost.values()
    for agent in range(geometry.agents):
        layer, head = divmod(agent, geometry.kv_heads)
        numbers = [f"{float(column[agent]):.3f}" for column in columns]
        table.add_row(f"{layer}.{head}", *numbers, str(int(best_step[agent])))
    means = [float(column.nanmean()) for column in columns]
    means[3] = result.area_ratio
    table.add_section()
    table.add_row("all", *[f"{mean:.3f}" for mean in means], "")
    Console().print(table)
