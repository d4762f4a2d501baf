"""Markdown tables as CSV files, one per table, with an index that says what each holds.

    recipes/csv_tables.py FOLDER < tables.md

Reads Markdown from standard input. Cells stay as they are printed. A file is called by its number
and the words of its heading or caption; README.md lists them.
"""

from __future__ import annotations

import csv
import re
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

_WORDS = 9
"""Words of a caption that go into a file name."""
_RULE = re.compile(r"\|(\s*:?-+:?\s*\|)+")


@dataclass(frozen=True, kw_only=True)
class MarkdownTable:
    """A table and the text above it."""

    section: str
    """Last heading of level 2 before it; empty where there is none."""
    caption: str
    """Bold line before it, or the heading."""
    rows: tuple[tuple[str, ...], ...]
    """Cells, the header first."""


def tables_of(lines: Iterable[str]) -> Iterator[MarkdownTable]:
    """Tables of a Markdown text in order."""
    section = caption = ""
    rows: list[tuple[str, ...]] = []
    for line in [*lines, ""]:
        text = line.strip()
        if text.startswith("|"):
            if not _RULE.fullmatch(text):
                rows.append(tuple(cell.strip() for cell in text.strip("|").split("|")))
            continue
        if rows:
            yield MarkdownTable(section=section, caption=caption or section, rows=tuple(rows))
            rows, caption = [], ""
        if text.startswith("## "):
            section, caption = text.removeprefix("## "), ""
        elif text.startswith("**") and text.endswith("**"):
            caption = text.strip("*")


def file_name(number: int, table: MarkdownTable) -> str:
    """Name of a table's file: its number, and the first words of its caption."""
    words = re.findall(r"[a-z0-9_]+", re.split(r"[;(]", table.caption.lower())[0])
    return "-".join([f"{number:02d}", *words[:_WORDS]]) + ".csv"


def write(tables: Iterable[MarkdownTable], folder: Path) -> list[Path]:
    """Write the tables and their index into a folder; returns the files of the tables."""
    folder.mkdir(parents=True, exist_ok=True)
    paths, index = [], ["| file | table |", "|---|---|"]
    for number, table in enumerate(tables, start=1):
        path = folder / file_name(number, table)
        with path.open("w", newline="", encoding="utf-8") as stream:
            csv.writer(stream, lineterminator="\n").writerows(table.rows)
        where = f"{table.section}: " if table.section not in ("", table.caption) else ""
        index.append(f"| [{path.name}]({path.name}) | {where}{table.caption} |")
        paths.append(path)
    (folder / "README.md").write_text("\n".join(index) + "\n", encoding="utf-8")
    return paths


def main() -> None:
    """Command line: the folder to write to."""
    if len(sys.argv) != 2:
        raise SystemExit("usage: csv_tables.py FOLDER < tables.md")
    paths = write(tables_of(sys.stdin), Path(sys.argv[1]))
    print(f"{len(paths)} tables in {sys.argv[1]}")


if __name__ == "__main__":
    main()
