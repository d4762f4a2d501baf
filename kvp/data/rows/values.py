"""What the cells of a row mean, whatever wrote them: numbers, missing values, lists and texts.

pandas writes the whole numbers of a column with a missing value as 42.0, `datasets` a list of
objects as an object of lists, a CSV file everything as text. `plain_row` undoes this for every
format and column, so that the same table gives the same samples.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Mapping
from datetime import date
from decimal import Decimal
from typing import Any

MOST_TEXT = 32 * 2**20
"""Characters of one line, and of one text, at most."""
_MOST_ITEMS, _EXACT = 200_000, 2**53
"""Marks of a list as Python writes it, at most; below this a whole float is exact."""
MISSING = frozenset({"", "nan", "NaN", "NaT", "<NA>"})
"""Cells without a value, as pandas spells them."""
_OBJECTS = {"messages", "conversations", "prompt", "completion", "questions", "multi_turns"}
"""Columns that may hold a list of objects; those that may hold a list follow."""
_LISTS = _OBJECTS | {"answer", "answers", "reference", "references"}


class RowError(Exception):
    """A row that cannot be used; the message is the end of a sentence ("has no text")."""


class Untyped(dict[str, Any]):
    """A row of a file whose cells have no types (CSV)."""


def plain_row(row: Mapping[str, Any]) -> dict[str, Any]:
    """A row with its columns as JSON would hold them: None where a value is missing.

    A float without a fraction is a whole number. A cell of an `Untyped` row that is written as a
    list, in a column that may hold one, is that list. Raises RowError for a text that is too long,
    or cannot be written in UTF-8.
    """
    plain = {}
    for name, given in row.items():
        cell = plain_value(given)
        if isinstance(cell, str) and cell in MISSING:
            cell = None
        elif isinstance(cell, str) and isinstance(row, Untyped) and name in _LISTS:
            cell = _parse_list(cell, name)
        if name in _OBJECTS and isinstance(cell, dict):
            columns = [one for one in cell.values() if isinstance(one, list)]
            if columns and len(columns) == len(cell):
                cell = [dict(zip(cell, one, strict=True)) for one in zip(*columns, strict=True)]
        plain[name] = cell
    return plain


def plain_value(value: object) -> Any:  # noqa: ANN401
    """`value` and all in it as JSON has it; what JSON cannot hold stays as it is."""
    if isinstance(value, str):
        if len(value) > MOST_TEXT:
            raise RowError(f"has a text of {len(value)} characters, more than {MOST_TEXT}")
        try:
            value.encode()
        except UnicodeEncodeError:
            raise RowError("has half of a surrogate pair in a text") from None
    elif isinstance(value, Mapping):
        return {str(name): plain_value(one) for name, one in value.items()}
    elif isinstance(value, list | tuple):
        return [plain_value(one) for one in value]
    elif isinstance(value, float | Decimal):
        if value != value:  # not a number
            return None
        exact = -_EXACT < value < _EXACT or isinstance(value, Decimal)
        return int(value) if exact and value == int(value) else float(value)
    elif hasattr(value, "tolist"):  # of NumPy
        return plain_value(value.tolist())
    elif isinstance(value, date) or type(value).__name__ == "NAType":  # of pandas
        text = str(value).removesuffix(" 00:00:00")
        return None if text in MISSING else text
    return value


def _parse_list(text: str, name: str) -> object:
    """The list or object that a cell is written as, by JSON or by Python; else the cell."""
    if text[0] + text[-1] not in ("[]", "{}"):
        return text
    try:
        value = json.loads(text)
    except ValueError:
        try:
            if sum(map(text.count, "([{,+-")) > _MOST_ITEMS:  # each takes 1 kB or more
                raise RowError(f"has a list in {name} of more than {_MOST_ITEMS} items")
            value = ast.literal_eval(text)
        except (ValueError, SyntaxError, MemoryError):
            return text
        if repr(value) != text:  # NumPy's ['a' 'b'] is ['ab'] in Python
            raise RowError(f"has a list in {name} that neither JSON nor Python writes so") from None
    messages = isinstance(value, list) and all(isinstance(one, Mapping) for one in value)
    return plain_value(value) if messages or name not in ("prompt", "completion") else text


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
    if not isinstance(content, str | int | float):
        raise RowError(f"has a value that is not text{where}")
    return str(content)


def name_in(row: Mapping[str, Any], column: str) -> str:
    """The text of a column that may be missing, empty then; RowError where it holds a list."""
    value = row.get(column)
    if not isinstance(value, str | int | float | None):
        raise RowError(f"has a value that is not text in {column}")
    return "" if value is None else str(value)


def texts_of(given: object, where: str) -> tuple[str, ...]:
    """The different answers of a cell: a text or number, a list of them, SQuAD's objects `text`."""
    if isinstance(given, Mapping):
        if "text" not in given:
            raise RowError(f"has an object without 'text'{where}")
        given = given["text"]
    every = given if isinstance(given, list) else [] if given in (None, "") else [given]
    found = [one.get("text") if isinstance(one, Mapping) else one for one in every]
    if any(isinstance(one, list) for one in found):
        raise RowError(f"has a list within a list{where}")
    return tuple(dict.fromkeys(text_of(one, where) for one in found))


def whole_number(row: Mapping[str, Any], column: str, most: int) -> int | None:
    """The number from 1 to `most` in a column, also as 8.0 or "8"; None if missing; RowError."""
    value = row.get(column)
    found = re.fullmatch(r"\s*(\d{1,12})(\.0*)?\s*", str(value))
    if value is None or (found and 1 <= int(found[1]) <= most):
        return None if found is None else int(found[1])
    raise RowError(f"has {column} {value!r:.40}, which is not a whole number from 1 to {most}")
