"""Columns of rows, other names for them (`--columns NEW=OLD,...`), and the text of their cells."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


class RowError(Exception):
    """A row that cannot be used; the message is the end of a sentence ("has no text")."""


def text_of(content: object, where: str = "") -> str:
    """The text of a message's content: a string, or a list of text parts joined.

    Raises RowError for None, anything empty and parts that are not text.
    """
    if isinstance(content, Mapping):
        content = [content]
    if isinstance(content, Sequence) and not isinstance(content, str):
        parts = [part.get("text") if isinstance(part, Mapping) else part for part in content]
        if not all(isinstance(part, str) for part in parts):
            raise RowError(f"has a part that is not text{where}")
        content = "".join(map(str, parts))
    if content is None or (isinstance(content, str) and not content.strip()):
        raise RowError(f"has no text{where}")
    if not isinstance(content, str):
        raise RowError(f"has a value that is not text{where}")
    return content


def renamed_columns(text: str) -> dict[str, str]:
    """`NEW=OLD,...` as a mapping from the new name to the file's.

    Raises ValueError, naming the flag, where it is not of this form.
    """
    names: dict[str, str] = {}
    for part in text.split(","):
        new, equals, old = (piece.strip() for piece in part.partition("="))
        if not (new and equals and old):
            raise ValueError(f"--columns: {part!r} is not NEW=OLD, such as question=query")
        if new in names:
            raise ValueError(f"--columns: {new!r} is named twice")
        names[new] = old
    return names


def renamed(row: Mapping[str, Any], columns: Mapping[str, str]) -> Mapping[str, Any]:
    """A row with columns of other names; raises RowError where it lacks one of the file's names."""
    for old in columns.values():
        if old not in row:
            raise RowError(f"has no column {old!r}, which --columns names")
    kept = {name: cell for name, cell in row.items() if name not in columns.values()}
    return {**kept, **{new: row[old] for new, old in columns.items()}}
