"""Rows one by one: which are used, which are left out, and the line that says so."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from textwrap import shorten
from typing import Any, TypeVar

from kvp.config_groups import split_list
from kvp.data.rows.cells import RowError, renamed
from kvp.data.rows.files import Row, Unreadable
from kvp.data.task import NoPromptError, TaskSettings
from kvp.errors import UsageError


@dataclass(frozen=True, kw_only=True)
class RowChoice:
    """The rows and threads that the user asks for."""

    where: Mapping[str, frozenset[str]] = field(default_factory=dict)
    """Column -> values, in lower case, of which a row must have one."""
    all_threads: bool = False
    """Whether every thread of a message tree is read, or the best one."""

    @classmethod
    def of(cls, settings: TaskSettings) -> RowChoice:
        """The choice that settings spell."""
        where: dict[str, frozenset[str]] = {}
        for part in split_list(settings.where or ""):
            column, _, value = (each.strip() for each in part.partition("="))
            where[column] = where.get(column, frozenset()) | {value.lower()}
        return cls(where=where, all_threads=settings.tree_paths == "all")

    def takes(self, row: Mapping[str, Any]) -> bool:
        """Whether a row has a wanted value in every column that is asked about.

        A whole tree also has the columns of its first message.
        """
        columns = columns_of(row) if self.where else {}
        return all(
            column in columns and str(columns[column]).strip().lower() in values
            for column, values in self.where.items()
        )

    @property
    def flag(self) -> str:
        """What `--where` says."""
        parts = [f"{column}={value}" for column, some in self.where.items() for value in some]
        return "--where " + ",".join(sorted(parts))


def columns_of(row: Mapping[str, Any]) -> Mapping[str, Any]:
    """The columns of a row; of a whole tree also those of its first message."""
    prompt = row.get("prompt")
    return {**prompt, **row} if isinstance(prompt, Mapping) else row


EVERY_ROW = RowChoice()
"""All rows, and the best thread of each tree."""


T = TypeVar("T")
Skipped = tuple[str, str]
"""Location of a row and why it cannot be used ("line 7", "has no text")."""
_MAX_NAMED = 3
"""Skipped rows that a message names at most."""
_MAX_COLUMNS = 12
"""Columns that a message names at most."""


@dataclass
class Tally:
    """Reads rows and counts those that are not used."""

    choice: RowChoice = EVERY_ROW
    columns: Mapping[str, str] | None = None
    """Columns that are called otherwise: new name -> the file's."""
    rows: int = 0
    """Rows read, good and bad."""
    not_chosen: int = 0
    """Rows that `choice` leaves out."""
    skipped: list[Skipped] = field(default_factory=list)
    _other_columns: set[str] = field(default_factory=set)
    """Columns of the rows that `choice` leaves out."""

    def parsed(
        self, rows: Iterable[Row], parse: Callable[[str, Mapping[str, Any]], T]
    ) -> Iterator[tuple[str, T]]:
        """Location of every row that is chosen, and what `parse` makes of location and row.

        A row for which it raises RowError is skipped, and one whose cells hold other types than it
        reads.
        """
        for location, row in rows:
            self.rows += 1
            try:
                if isinstance(row, Unreadable):
                    raise RowError(row.reason)
                row = renamed(row, self.columns or {})
                if not self.choice.takes(row):
                    self.not_chosen += 1
                    self._other_columns.update(map(str, columns_of(row)))
                    continue
                made = parse(location, row)
            except RowError as error:
                self.skipped.append((location, str(error)))
            except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
                reason = f"has cells of another form ({type(error).__name__}: {error})"
                self.skipped.append((location, reason))
            else:
                yield location, made

    def check(self, what: str) -> None:
        """Raise UsageError, which begins with `what`, where there is no row or none is chosen."""
        if not self.rows:
            raise UsageError(f"{what}: there is nothing in it")
        if self.rows == self.not_chosen:
            unknown = sorted(self.choice.where.keys() - self._other_columns)
            there = f"; no row has {', '.join(unknown)}" if unknown else ""
            if unknown:
                there += f" (there are: {', '.join(sorted(self._other_columns)[:_MAX_COLUMNS])})"
            raise NoPromptError(
                f"{what}: {self.choice.flag} takes none of its {self.rows} rows{there}"
            )

    def note(self) -> str | None:
        """One line on the rows that were skipped or not chosen, None without any."""
        parts = []
        if self.not_chosen:
            taken = self.rows - self.not_chosen
            parts.append(f"{self.choice.flag} takes {taken} of {self.rows} rows")
        if self.skipped:
            parts.append(f"skipped {len(self.skipped)} of {self.rows} rows: {listed(self.skipped)}")
        return "; ".join(parts) or None


def listed(skipped: Sequence[Skipped]) -> str:
    """The first few locations with their reasons, and how many more there are."""
    named = ", ".join(_plain(f"{location} {reason}") for location, reason in skipped[:_MAX_NAMED])
    more = len(skipped) - _MAX_NAMED
    return f"{named} and {more} more" if more > 0 else named


def _plain(text: str) -> str:
    """Text of a stranger's file in one short line without control characters."""
    printable = "".join(letter if letter.isprintable() else " " for letter in text)
    return shorten(printable, width=200, placeholder=" ...")
