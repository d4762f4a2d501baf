"""What the cells of a row mean, whatever wrote them: numbers, missing values, lists and texts.

pandas writes the whole numbers of a column with a missing value as 42.0. `plain_row` undoes this
for every format and column, so that the same table gives the same samples.
"""

import math
from collections.abc import Mapping
from typing import Any

_EXACT = 2**53
"""Below this a whole float is exact."""


class RowError(Exception):
    """A row that cannot be used; the message is the end of a sentence ("has no text")."""


def plain_row(row: Mapping[str, Any]) -> dict[str, Any]:
    """A row with cells as JSON has them, None where empty; RowError for text beyond UTF-8."""
    plain = {name: plain_value(cell) for name, cell in row.items()}
    return {name: None if cell == "" else cell for name, cell in plain.items()}


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
    elif isinstance(value, float):
        if math.isnan(value):
            return None
        return int(value) if value.is_integer() and abs(value) < _EXACT else value
    return value


def text_of(content: object, where: str = "") -> str:
    """The text of a content: text, a number or text parts joined; RowError for all else or none."""
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
