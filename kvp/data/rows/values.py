"""What the cells of a row mean, whatever wrote them: numbers, missing values, lists and texts.

pandas writes the whole numbers of a column with a missing value as 42.0, `datasets` a list of
objects as an object of lists. `plain_row` undoes this for every format and column, so that the same
table gives the same samples.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from datetime import date
from decimal import Decimal
from typing import Any

_EXACT = 2**53
"""Below this a whole float is exact."""
_OBJECTS = {"messages", "conversations", "prompt", "completion", "questions", "multi_turns"}
"""Columns that may hold a list of objects."""


class RowError(Exception):
    """A row that cannot be used; the message is the end of a sentence ("has no text")."""


def plain_row(row: Mapping[str, Any]) -> dict[str, Any]:
    """A row with its columns as JSON would hold them: None where a value is missing.

    A float without a fraction is a whole number. Raises RowError for a text that cannot be written
    in UTF-8.
    """
    plain = {}
    for name, given in row.items():
        cell = plain_value(given)
        if cell == "":
            cell = None
        if name in _OBJECTS and isinstance(cell, dict):
            columns = [column for column in cell.values() if isinstance(column, list)]
            if columns and len(columns) == len(cell):
                cell = [dict(zip(cell, cells, strict=True)) for cells in zip(*columns, strict=True)]
        plain[name] = cell
    return plain


def plain_value(value: object) -> Any:  # noqa: ANN401
    """`value` and all in it as JSON has it; what JSON cannot hold stays as it is."""
    if isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError:
            raise RowError("has half of a surrogate pair in a text") from None
    elif isinstance(value, Mapping):
        return {str(name): plain_value(item) for name, item in value.items()}
    elif isinstance(value, list | tuple):
        return [plain_value(item) for item in value]
    elif isinstance(value, float | Decimal):
        if value != value:  # not a number
            return None
        if not math.isfinite(value):
            raise RowError("has a number that is not finite")
        exact = -_EXACT < value < _EXACT or isinstance(value, Decimal)
        return int(value) if exact and value == int(value) else float(value)
    elif isinstance(value, date):
        return str(value).removesuffix(" 00:00:00")
    return value


def text_of(content: object, where: str = "") -> str:
    """The text of a message's content: a text, a number, or a list of text parts joined.

    Raises RowError for None, anything empty and parts that are not text.
    """
    if isinstance(content, Mapping):
        content = [content]
    if isinstance(content, list):
        parts = [part.get("text") if isinstance(part, Mapping) else part for part in content]
        if not all(isinstance(part, str) for part in parts):
            raise RowError(f"has a part that is not text{where}")
        content = "".join(map(str, parts))
    if content is None or (isinstance(content, str) and not content.strip()):
        raise RowError(f"has no text{where}")
    if isinstance(content, bool) or not isinstance(content, str | int | float):
        raise RowError(f"has a value that is not text{where}")
    return str(content)


def name_in(row: Mapping[str, Any], column: str) -> str:
    """The text of a column that may be missing, empty then; RowError where it holds a list."""
    value = row.get(column)
    if isinstance(value, bool) or not isinstance(value, str | int | float | None):
        raise RowError(f"has a value that is not text in {column}")
    return "" if value is None else str(value)


def texts_of(given: object, where: str) -> tuple[str, ...]:
    """The different answers of a cell: a text or number, a list of them, SQuAD's objects `text`."""
    if isinstance(given, Mapping):
        if "text" not in given:
            raise RowError(f"has an object without 'text'{where}")
        given = given["text"]
    every = given if isinstance(given, list) else [] if given in (None, "") else [given]
    answers = [answer.get("text") if isinstance(answer, Mapping) else answer for answer in every]
    if any(isinstance(answer, list) for answer in answers):
        raise RowError(f"has a list within a list{where}")
    return tuple(dict.fromkeys(text_of(answer, where) for answer in answers))


def whole_number(row: Mapping[str, Any], column: str, most: int) -> int | None:
    """The number from 1 to `most` in a column, also as 8.0 or "8"; None if missing; RowError."""
    value = row.get(column)
    match = re.fullmatch(r"\s*(\d{1,12})(\.0*)?\s*", str(value))
    if value is None or (match and 1 <= int(match[1]) <= most):
        return None if match is None else int(match[1])
    raise RowError(f"has {column} {value!r:.40}, which is not a whole number from 1 to {most}")
