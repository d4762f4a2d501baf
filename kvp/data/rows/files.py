"""Reads rows of JSONL, JSON, parquet, folders of files and the hub, and plain texts.

`datasets` reads the hub, pyarrow parquet. JSON is read here: `datasets` gives all rows of a file
one schema, so rows of different forms and trees of different depth fail. Every reader yields rows
with their location in the file; one that cannot be read is yielded as a `RowError`, so that one bad
line does not cost the file. A `Tally` counts what is not used.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from pathlib import Path
from textwrap import shorten
from typing import Any, TypeVar

from kvp.artifacts.files import parse_json
from kvp.data.rows.values import RowError, plain_row
from kvp.errors import UsageError, first_line
from kvp.progress import quiet_logs

T = TypeVar("T")
TEXT_SUFFIXES = (".txt", ".md")
"""Files that are one running text."""
_MAX_NAMED = 3
"""Skipped rows, files or keys that a message names at most."""
_UNREADABLE = (OSError, ValueError, RecursionError)
_parse = partial(parse_json, parse_constant=int)  # which refuses NaN and Infinity

Row = tuple[str, Any]
"""Location of a row in its data ("line 7"); its columns, or the RowError why it has none."""
Skipped = tuple[str, str]
"""Location of a row and why it cannot be used ("line 7", "has no text")."""


def read_rows(data: str, what: str, left_out: list[str] | None = None) -> Iterator[Row]:
    """Rows of a file, a folder or a hub data set (`NAME` or `NAME:CONFIGURATION`), in order.

    All splits of a data set follow one another. `left_out` gets names of files that are not read.
    Raises UsageError, which begins with `what`, where there is no such data or it is unreadable.
    """
    path = Path(data)
    if not data.strip():
        raise UsageError(f"{what} is empty")
    try:
        reader = READERS.get(path.suffix.lower())
        if path.is_dir():
            yield from _folder(path, what, left_out)
        elif path.exists():
            if not path.is_file():  # a pipe is read once
                raise UsageError(f"{what} {data}: is no regular file: write its content to one")
            if reader is None:
                raise UsageError(f"{what} {data}: unknown kind of file; use one of {KINDS}")
            yield from reader(path)
        elif reader is not None or data.startswith((".", "/", "~")) or data.count("/") > 1:
            # Of a data set of the hub no name is written like this.
            raise UsageError(f"{what} {data}: no such file or folder")
        else:
            yield from _hub(data, what)
    except _UNREADABLE as error:
        raise UsageError(f"{what} {data}: cannot be read ({error})") from error


def files_of(data: str, what: str) -> tuple[list[Path], list[Path], list[Path]]:
    """Files of rows, of running text and of other kinds that a path means, sorted.

    A file means itself, a folder what is in it and below, without what is hidden. Raises
    UsageError, which begins with `what`, where the path is empty.
    """
    if not data.strip():
        raise UsageError(f"{what} is empty")
    path = Path(data)
    rows: list[Path] = []
    texts: list[Path] = []
    others: list[Path] = []
    for file in sorted(path.rglob("*")) if path.is_dir() else [path]:
        hidden = any(part.startswith(".") for part in file.relative_to(path).parts)
        if hidden or (file.is_dir() and not file.is_symlink()):
            continue
        suffix = file.suffix.lower() if file == path or file.is_file() else ""
        kind = rows if suffix in READERS else texts if suffix in TEXT_SUFFIXES else others
        kind.append(file)
    return rows, texts, others


def _json_lines(path: Path) -> Iterator[Row]:
    with open(path, encoding="utf-8-sig") as file:
        for number, line in enumerate(file, start=1):
            if line.strip():
                try:
                    row = _parse(line)
                except (ValueError, RecursionError) as error:
                    row = RowError(f"is not JSON ({error})")
                yield f"line {number}", row


def _json(path: Path) -> Iterator[Row]:
    """A list of objects, one object, or lines of objects."""
    try:
        content = _parse(path.read_bytes().decode("utf-8-sig"))
    except (json.JSONDecodeError, RecursionError):
        yield from _json_lines(path)
        return
    for number, row in enumerate(content if isinstance(content, list) else [content], start=1):
        yield f"row {number}", row


def _parquet(path: Path) -> Iterator[Row]:
    from pyarrow.parquet import ParquetFile  # type: ignore[import-untyped]

    def load() -> Iterator[Mapping[str, Any]]:
        with ParquetFile(path) as file:
            for batch in file.iter_batches(batch_size=16):  # a few, since a cell may hold a book
                yield from batch.to_pylist()

    return _parts(load)


def _folder(folder: Path, what: str, left_out: list[str] | None) -> Iterator[Row]:
    files, *others = files_of(str(folder), what)
    if left_out is not None:
        left_out += [path.name for path in sorted(chain(*others))]
    if not files:
        raise UsageError(
            f"{what} {folder}: no data in this folder; it may hold files of kind {KINDS}"
        )
    for file in files:
        for location, row in read_rows(str(file), what):
            yield f"{file.relative_to(folder)} {location}", row


def _hub(name: str, what: str) -> Iterator[Row]:
    from datasets import load_dataset

    base, _, configuration = name.partition(":")
    try:
        yield from _parts(lambda: load_dataset(base, configuration or None))
    except OSError as error:
        raise UsageError(
            f"{what} {name}: not a file ({KINDS}), a folder of such files or a data set that "
            f"loads ({error})"
        ) from error


def _parts(load: Callable[[], Any]) -> Iterator[Row]:
    """Rows of all parts of what `datasets` loads; OSError, of one line, where it cannot."""
    try:
        with quiet_logs():
            loaded = load()
            for part, rows in loaded.items() if isinstance(loaded, dict) else [("", loaded)]:
                for number, row in enumerate(rows, start=1):
                    yield f"{part} row {number}".strip(), row
    except Exception as error:  # whatever a hub, a cache or a damaged file can raise
        raise OSError(first_line(error)) from error


READERS: Mapping[str, Callable[[Path], Iterator[Row]]] = {
    ".jsonl": _json_lines,
    ".json": _json,
    ".parquet": _parquet,
}
KINDS = ", ".join((*READERS, *TEXT_SUFFIXES))


def read_text(path: str | None, what: str) -> tuple[str, Tally]:
    """Text of a file or folder ("" without a path), and what was left out. Errors name `what`."""
    if path is None:
        return "", Tally()
    if not Path(path).exists():
        raise UsageError(f"{what} {path}: no such file or folder")
    rows, texts, others = files_of(path, what)
    texts, parts = texts or [Path(path)], []
    for file in texts:
        try:
            parts.append(file.read_bytes().decode("utf-8-sig"))
        except _UNREADABLE as error:
            raise UsageError(f"{what} {file}: cannot be read as text ({error})") from error
        if not parts[-1].strip() or "\0" in parts[-1]:
            raise UsageError(f"{what} {file}: there is no text in it, or it is not in UTF-8")
    text = "\n\n".join(parts).replace("\r\n", "\n").replace("\r", "\n")
    return text, Tally(rows=1, left_out=[file.name for file in rows + others if file not in texts])


@dataclass
class Tally:
    """Reads rows and counts those that are not used."""

    rows: int = 0
    """Rows read, good and bad."""
    skipped: list[Skipped] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)
    """Files of a folder that are not read."""
    unread: set[str] = field(default_factory=set)
    """Keys of rows that are not read."""

    def parse_rows(
        self, rows: Iterable[Row], parse: Callable[[str, Mapping[str, Any]], T]
    ) -> Iterator[tuple[str, T]]:
        """Location of every row, and what `parse` makes of both; what it refuses is skipped."""
        for location, row in rows:
            self.rows += 1
            try:
                if not isinstance(row, Mapping):
                    raise row if isinstance(row, RowError) else RowError("is not a JSON object")
                yield location, parse(location, plain_row(row))
            except RowError as error:
                self.skipped.append((location, str(error)))
            except (AttributeError, LookupError, TypeError, ValueError, RecursionError) as error:
                self.skipped.append((location, other_form(error)))

    def check(self, what: str, usable: Collection[object], use: str = "can be used") -> None:
        """Raise UsageError, which begins with `what`, where no row is there, or usable."""
        if not self.rows:
            raise UsageError(f"{what}: there is nothing in it")
        if not usable:
            why = f": {list_first(self.skipped[:1])}" if self.skipped else ""
            raise UsageError(f"{what}: none of its {self.rows} rows {use}{why} (docs/data.md)")

    def notes(self, what: str) -> tuple[str, ...]:
        """One line on rows, files and keys that are not used; it begins with `what`."""
        unused: dict[str, Sequence[Skipped | str]] = {
            f"skipped {len(self.skipped)} of {self.rows} rows": self.skipped,
            f"files that were not read ({len(self.left_out)})": self.left_out,
            f"keys that were not read ({len(self.unread)})": sorted(self.unread),
        }
        listed = "; ".join(f"{name}: {list_first(each)}" for name, each in unused.items() if each)
        return (f"{what}: {listed}",) if listed else ()


def other_form(error: Exception) -> str:
    """Why a row cannot be used whose cells are not what its columns have."""
    return f"has cells of another form ({type(error).__name__}: {error})"


def list_first(unused: Sequence[Skipped | str]) -> str:
    """The first few locations with their reasons, in short, and how many more there are."""
    texts = [one if isinstance(one, str) else " ".join(one) for one in unused[:_MAX_NAMED]]
    printable = ("".join(c if c.isprintable() else " " for c in text) for text in texts)
    named = ", ".join(shorten(text, width=200, placeholder=" ...") for text in printable)
    more = len(unused) - _MAX_NAMED
    return f"{named} and {more} more" if more > 0 else named
