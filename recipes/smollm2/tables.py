"""Tables of docs/results/smollm2.md: methods by budget, and tasks, as Markdown.

python recipes/smollm2/tables.py RESULTS [RESULTS ...]
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path

from eval.push.measured import method_tables
from eval.results.folder import ROWS
from eval.results.records import FULL, Record, read_records

FEW = ("2%", "6%", "12.5%", "25%")
"""Budgets of the tables of tasks."""


def tasks(records: Iterable[Record]) -> Iterator[str]:
    """Mean answers of each task in %: one table per protocol."""
    cells: dict[tuple[str, str, str, str | None], list[float]] = defaultdict(list)
    for record in records:
        if record["score"] is not None:
            method = (record["policy"] and "kvp") or record["method"]
            key = (record["protocol"], record["task"], method, record["budget_spec"])
            cells[key].append(record["score"])
    for protocol in sorted({key[0] for key in cells}):
        own = {key[1:]: values for key, values in cells.items() if key[0] == protocol}
        methods = sorted({key[1] for key in own} - {FULL}, key=lambda name: (name != "kvp", name))
        yield f"\n**{protocol}: answers by task, %, at {', '.join(FEW)} of the cache**\n"
        yield f"| task | prompts | full | {' | '.join(methods)} |"
        yield f"|---|--:|--:|{'--:|' * len(methods)}"
        for task in dict.fromkeys(key[0] for key in own):
            full = own[task, FULL, None]
            line = [task, str(len(full)), _percent(full)]
            for method in methods:
                line.append(" / ".join(_percent(own.get((task, method, one), [])) for one in FEW))
            yield f"| {' | '.join(line)} |"


def _percent(values: list[float]) -> str:
    return f"{100 * sum(values) / len(values):.0f}" if values else "–"


def main(folders: Iterable[str]) -> None:
    """Print the tables of every folder."""
    for folder in folders:
        for table in method_tables(Path(folder)):
            print(f"\n**{table.title}**\n\n| method | {' | '.join(table.budgets)} |")
            print(f"|---|{'--:|' * len(table.budgets)}")
            print("\n".join(f"| {' | '.join(row)} |" for row in table.rows))
        for line in tasks(read_records(Path(folder) / ROWS)):
            print(line)


if __name__ == "__main__":
    main(sys.argv[1:])
