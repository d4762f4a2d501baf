"""Tables of the report as Markdown, for pages of documentation."""

from __future__ import annotations

from eval.report.page import Field, Table


def markdown(table: Table) -> str:
    """A table with its caption as bold text above it."""
    lines = [[_cell(cell) for cell in row] for row in (table.header, *table.rows)]
    body = [f"| {' | '.join(line)} |" for line in lines]
    rule = "|---" + "|--:" * (len(table.header) - 1) + "|"
    return "\n".join([f"**{table.caption}**", "", body[0], rule, *body[1:], ""])


def _cell(cell: Field | str) -> str:
    if isinstance(cell, str):
        return cell
    small = cell.small.replace("\n", ", ")
    return f"{cell.text} ({small})" if small else cell.text
