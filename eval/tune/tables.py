"""The result of a tuning as a printed table and as CSV. No number is computed here."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from eval.tune.settings_file import Scored, Tuned, TunedSettings

TABLE = "settings.csv"
"""Every setting that was tried, in the order of trying."""
COLUMNS = (
    "protocol", "method", "group", "setting", "scorer", "allocator", "protected", "score", "low",
    "high", "published", "chosen",
)  # fmt: skip


def csv_text(settings: TunedSettings, tried: Sequence[Sequence[Scored]]) -> str:
    """One line per setting; `tried` has those of each entry of `settings`."""
    stream = io.StringIO()
    writer = csv.writer(stream, lineterminator="\n")
    writer.writerow(COLUMNS)
    for entry, all_scored in zip(settings.methods, tried, strict=True):
        for number, scored in enumerate(all_scored, start=1):
            low, high = scored.interval
            writer.writerow(
                [
                    entry.protocol, entry.requested, entry.group, number, scored.scorer,
                    scored.allocator, int(scored.protected), f"{scored.score:.6g}",
                    f"{low:.6g}", f"{high:.6g}",
                    int(scored in entry.published), int(scored == entry.chosen),
                ]
            )  # fmt: skip
    return stream.getvalue()


def print_settings(console: Console, settings: TunedSettings) -> None:
    """One table per protocol."""
    percent = settings.data["metric"] == "score"
    what = "mean score, %" if percent else "minus nats per token"
    for protocol in dict.fromkeys(entry.protocol for entry in settings.methods):
        entries = [entry for entry in settings.methods if entry.protocol == protocol]
        console.print(
            f"{protocol}: {what}, over the budgets {', '.join(settings.data['budgets'])} and "
            f"{len(settings.data['tasks'])} tasks, {settings.split} split"
        )
        console.print(_table(entries, percent=percent))
    console.print(
        "+p: first and last tokens are always kept. The best of many settings is optimistic on the "
        f'prompts that chose it. "published": best of the default and the presets. All: {TABLE}.'
    )


def _table(entries: Sequence[Tuned], *, percent: bool) -> Table:
    table = Table(box=None, pad_edge=False)
    table.add_column("method", no_wrap=True)
    for name in ("tried", "score (95 %)", "published"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("chosen", overflow="fold")  # the longest one, so the last one
    for entry in entries:
        table.add_row(*_row(entry, percent=percent))
    return table


def _row(entry: Tuned, *, percent: bool) -> list[str]:
    def text(value: float) -> str:
        return f"{100 * value:.0f}" if percent else f"{value:.3f}"

    group = f"/{entry.group}" if entry.group else ""
    low, high = entry.chosen.interval
    return [
        f"{entry.requested}{group}",
        f"{entry.tried}{' (all)' if entry.exhausted else ''}",
        f"{text(entry.chosen.score)} ({text(low)} to {text(high)})",
        text(max(each.score for each in entry.published)),
        entry.chosen.label,
    ]
