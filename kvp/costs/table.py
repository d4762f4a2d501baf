"""The table of ways that dry runs print, and the sentence that recommends one."""

from __future__ import annotations

from collections.abc import Sequence

from rich.filesize import decimal

from kvp.costs.plan import Plan
from kvp.costs.rates import Rates
from kvp.costs.ways import ONLINE, Cost

ENOUGH = 100
"""Training sequences that learning curves justify (docs/results/generalisation.md)."""
WHY_ENOUGH = (
    f"{ENOUGH} training sequences are enough: skill 0.845 with 20 of them, 0.854 with 80, 0.856 "
    "with 300 (nano, docs/results/generalisation.md)"
)
_COLUMNS = ("way", "disk", "RAM", "GPU", "collecting", "training", "in all")


def table_lines(plan: Plan, rates: Rates, costs: Sequence[Cost]) -> list[str]:
    """The plan in a line, a row per way, and where each number comes from."""
    rows = [_COLUMNS, *map(_row, costs)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(_COLUMNS))]
    table = [
        "  ".join(
            text.ljust(width) if column == 0 else text.rjust(width)
            for column, (text, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    ]
    training, lengths = plan.training, plan.lengths
    return [
        f"{plan.model.geometry}, {plan.model.parameters / 1e9:.3g} B parameters, {plan.dtype}; "
        f"{plan.train} training and {plan.validation} validation sequences of "
        f"{'at most' if lengths.bound else 'about'} {lengths.prompt} + {lengths.answer} tokens; "
        f"{training.steps:,} steps of "
        f"{training.contexts} contexts",
        *table,
        f"disk, RAM and GPU memory: counted, with --memory_gb {plan.memory_gb} (about 1 GB of RAM "
        "for the program on top)",
        f"times: {rates.source}",
        *_too_large(rates, costs),
    ]


def _too_large(rates: Rates, costs: Sequence[Cost]) -> list[str]:
    """A line where one accelerator cannot hold a way."""
    large = [cost.way for cost in costs if cost.memory.device_bytes > rates.device_bytes]
    if not large:
        return []
    return [
        f"warning: {', '.join(large)}: more than the {decimal(round(rates.device_bytes))} of one "
        "GPU; --quantization 8bit or 4bit makes the model smaller, --activation_gb the training"
    ]


def recommendation(cost: Cost, others: Sequence[Cost]) -> str:
    """One sentence: the way, what it takes, and when another one is better."""
    disk = f"{decimal(cost.disk_bytes)} on disk" if cost.disk_bytes else "nothing on disk"
    text = f"recommended: {cost.way}, {span(cost.seconds)} in all and {disk}"
    stores = [other for other in others if other.disk_bytes]
    if cost.way != ONLINE or not stores:
        return text
    again = min(stores, key=lambda other: other.train_seconds)
    return (
        f"{text}; to train many policies on the same sequences, collect once "
        f"({again.way}: {span(again.train_seconds)} each after collecting)"
    )


def span(seconds: float) -> str:
    """A time span for people."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    if seconds < 2 * 3600:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h"


def _row(cost: Cost) -> tuple[str, ...]:
    memory = cost.memory
    return (
        cost.way,
        decimal(cost.disk_bytes) if cost.disk_bytes else "none",
        decimal(round(memory.ram_bytes)),
        decimal(round(memory.device_bytes)) if memory.device_bytes else "-",
        span(cost.collect_seconds),
        span(cost.train_seconds),
        span(cost.seconds),
    )
