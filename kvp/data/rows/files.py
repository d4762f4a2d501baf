"""Read rows of JSONL, JSON, parquet, `save_to_disk` folders, folders of files, the hub; texts.

`datasets` reads saved folders and the hub, pyarrow parquet. JSON is read here: `datasets` gives all
rows of a file one schema, so rows of different forms and trees of different depth fail. Every
reader yields rows with their location in the file; one that cannot be read is yielded as a
`RowError`, so that one bad line does not cost the file. A `Tally` counts what is not used.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from textwrap import shorten
from typing import Any, TypeVar

from kvp.data.rows.values import RowError, plain_row
from kvp.errors import UsageError, first_line
from kvp.program.progress import quiet_logs

T = TypeVar("T")
TEXT_SUFFIXES = (".txt", ".md")
"""Files that are one running text."""
SHARES = {"train": (0.0, 0.8), "validation": (0.8, 0.9), "test": (0.9, 1.0), "all": (0.0, 1.0)}
"""Which part of a text each split owns, as fractions of its length."""
_MAX_NAMED = 3
"""Skipped rows that a message names at most."""

Row = tuple[str, Any]
"""Location of a row in its data ("line 7"); its columns, or the RowError why it has none."""
Skipped = tuple[str, str]
"""Location of a row and why it cannot be used ("line 7", "has no text")."""


def read_rows(data: str, flag: str) -> Iterator[Row]:
    """Rows of a file, a folder or a hub data set (`NAME` or `NAME:CONFIGURATION`), in order.

    All splits of a data set follow one another. Raises UsageError naming `flag` where there is no
    such data, or it cannot be read at all.
    """
    path = Path(data)
    if not data.strip():
        raise UsageError(f"--{flag} is empty")
    try:
        reader = reader_of(path)
        if path.is_dir():
            yield from _folder(path, flag)
        elif reader is not None and path.is_file():
            yield from reader(path)
        elif path.exists():
            raise UsageError(
                f"--{flag} {data}: unknown kind of file; use one of {', '.join(KINDS)}"
            )
        elif reader is not None or data.startswith((".", "/", "~")) or data.count("/") > 1:
            # Of a data set of the hub no name is written like this.
            raise UsageError(f"--{flag} {data}: no such file or folder")
        else:
            yield from _hub(data, flag)
    except _UNREADABLE as error:
        raise UsageError(f"--{flag} {data}: cannot be read ({error})") from error


def reader_of(path: Path) -> Callable[[Path], Iterator[Row]] | None:
    """The reader for the suffix of a path, None for another one."""
    return READERS.get(path.suffix.lower())


def files_of(folder: Path) -> list[Path]:
    """Files of rows in a folder and below, sorted; hidden ones are left out."""
    return [
        path
        for path in sorted(folder.rglob("*"))
        if path.is_file()
        and reader_of(path) is not None
        and not any(part.startswith(".") for part in path.relative_to(folder).parts)
        and path.name != "dataset_infos.json"
    ]


def is_saved(folder: Path) -> bool:
    """Whether `save_to_disk` wrote a folder."""
    return any((folder / name).is_file() for name in ("dataset_dict.json", "state.json"))


_UNREADABLE = (OSError, UnicodeError, RecursionError)
"""What reading a file raises."""


def _json_lines(path: Path) -> Iterator[Row]:
    with path.open(encoding="utf-8-sig") as file:
        for number, line in enumerate(file, start=1):
            if line.strip():
                try:
                    row = json.loads(line)
                except (ValueError, RecursionError) as error:
                    row = RowError(f"is not JSON ({error})")
                yield f"line {number}", row


def _json(path: Path) -> Iterator[Row]:
    """A list of objects, an object with one such list, or lines of objects."""
    try:
        content = json.loads(path.read_text(encoding="utf-8-sig"))
    except (ValueError, RecursionError):
        yield from _json_lines(path)
        return
    if isinstance(content, dict):
        lists = [value for value in content.values() if isinstance(value, list)]
        content = lists[0] if len(content) == len(lists) == 1 else content
    for number, row in enumerate(content if isinstance(content, list) else [content], start=1):
        yield f"row {number}", row


def _parquet(path: Path) -> Iterator[Row]:
    from pyarrow.parquet import ParquetFile  # type: ignore[import-untyped]

    def load() -> Iterator[Mapping[str, Any]]:
        with ParquetFile(path) as file:
            for batch in file.iter_batches(batch_size=16):  # a few, since a cell may hold a book
                yield from batch.to_pylist()

    return _parts(load)


def _folder(folder: Path, flag: str) -> Iterator[Row]:
    from datasets import load_from_disk

    saved = [path for path in (folder, *sorted(folder.iterdir())) if is_saved(path)]
    for path in saved:  # this folder, or one for each configuration of a data set
        for location, row in _parts(partial(load_from_disk, str(path))):
            yield location if path == folder else f"{path.name} {location}", row
        if path == folder:
            return
    files = [path for path in files_of(folder) if not any(map(path.is_relative_to, saved))]
    if not files and not saved:
        raise UsageError(
            f"--{flag} {folder}: no data in this folder; it may hold files of kind "
            f"{', '.join(KINDS)} or what save_to_disk writes"
        )
    for file in files:
        for location, row in read_rows(str(file), flag):
            yield f"{file.relative_to(folder)} {location}", row


def _hub(name: str, flag: str) -> Iterator[Row]:
    from datasets import load_dataset

    base, _, configuration = name.partition(":")
    try:
        yield from _parts(lambda: load_dataset(base, configuration or None))
    except OSError as error:
        raise UsageError(
            f"--{flag} {name}: not a file ({', '.join(KINDS)}), a folder of such files, a folder "
            f"of save_to_disk or a data set that loads ({error})"
        ) from error


def _parts(load: Callable[[], Any]) -> Iterator[Row]:
    """Rows of all parts of what `datasets` loads; OSError, of one line, where it cannot."""
    try:
        with quiet_logs():
            loaded = load()
            for part, rows in loaded.items() if isinstance(loaded, dict) else [("", loaded)]:
                if hasattr(rows, "with_format"):
                    rows = rows.with_format(None)  # tensors or tables, where its owner chose so
                for number, row in enumerate(rows, start=1):
                    yield f"{part} row {number}".strip(), row
    except Exception as error:  # whatever a hub, a cache or a damaged file can raise
        raise OSError(first_line(error)) from error


READERS: Mapping[str, Callable[[Path], Iterator[Row]]] = {
    ".jsonl": _json_lines,
    ".json": _json,
    ".parquet": _parquet,
}
"""Readers by suffix."""

KINDS = (*READERS, *TEXT_SUFFIXES)
"""Suffixes of files that can be read."""


def read_text(path: str, flag: str) -> str:
    """A text file, or all `*.txt` of a folder in the order of their names.

    Raises UsageError naming `flag` when there is none or it cannot be read.
    """
    source = Path(path)
    files = sorted(source.glob("*.txt")) if source.is_dir() else [source]
    if not files:
        raise UsageError(f"--{flag} {path}: no .txt file in this folder")
    try:
        text = "\n\n".join(file.read_text(encoding="utf-8-sig") for file in files)
    except _UNREADABLE as error:
        raise UsageError(f"--{flag} {path}: cannot be read as text ({error})") from error
    if not text.strip():
        raise UsageError(f"--{flag} {path}: there is no text in it")
    return text


def share_of(text: str, split: str) -> str:
    """The part of `text` that `split` owns, without the words that reach over an end."""
    low, high = (round(share * len(text)) for share in SHARES[split])
    part = text[low:high]
    if low > 0 and not text[low - 1].isspace():
        part = "".join(part.partition(" ")[1:])
    if high < len(text) and not text[high].isspace():
        part = part.rpartition(" ")[0]
    return part.strip()


@dataclass
class Tally:
    """Reads rows and counts those that are not used."""

    rows: int = 0
    """Rows read, good and bad."""
    skipped: list[Skipped] = field(default_factory=list)

    def parse_rows(
        self, rows: Iterable[Row], parse: Callable[[str, Mapping[str, Any]], T]
    ) -> Iterator[tuple[str, T]]:
        """Location of every row, and what `parse` makes of both.

        A row for which it raises RowError, or with cells of other types than it reads, is skipped.
        """
        for location, row in rows:
            self.rows += 1
            try:
                if not isinstance(row, Mapping):
                    raise row if isinstance(row, RowError) else RowError("is not a JSON object")
                yield location, parse(location, plain_row(row))
            except RowError as error:
                self.skipped.append((location, str(error)))
            except RecursionError:
                self.skipped.append((location, "is nested too deeply"))
            except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
                reason = f"has cells of another form ({type(error).__name__}: {error})"
                self.skipped.append((location, reason))

    def check(
        self, what: str, usable: Collection[object], use: str = "can be used", hint: str = ""
    ) -> None:
        """Raise UsageError, which begins with `what`, where no row is there, or usable."""
        if not self.rows:
            raise UsageError(f"{what}: there is nothing in it")
        if not usable:
            why = f": {list_skipped(self.skipped[:1])}" if self.skipped else ""
            raise UsageError(
                f"{what}: none of its {self.rows} rows {use}{why}{hint} (docs/data.md)"
            )

    def note(self) -> str | None:
        """One line on the rows that were skipped, None without any."""
        if not self.skipped:
            return None
        return f"skipped {len(self.skipped)} of {self.rows} rows: {list_skipped(self.skipped)}"


def list_skipped(skipped: Sequence[Skipped]) -> str:
    """The first few locations with their reasons, in short, and how many more there are."""
    texts = [f"{location} {reason}" for location, reason in skipped[:_MAX_NAMED]]
    printable = ("".join(c if c.isprintable() else " " for c in text) for text in texts)
    named = ", ".join(shorten(text, width=200, placeholder=" ...") for text in printable)
    more = len(skipped) - _MAX_NAMED
    return f"{named} and {more} more" if more > 0 else named
