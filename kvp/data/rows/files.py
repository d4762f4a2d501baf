"""Read rows of JSONL, JSON, CSV, parquet, `save_to_disk` folders, folders of files, the hub.

`datasets` reads parquet, saved folders and the hub. It does not read the others: it gives all rows
of a file one schema, so rows of different forms and trees of different depth fail, and dates and
numbers in texts change. Every reader yields rows with their location in the file. A row that cannot
be read is yielded as an `Unreadable`, so that one bad line does not cost the file.
"""

from __future__ import annotations

import csv
import glob
import gzip
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, cast

from kvp.errors import UsageError
from kvp.plugins import is_object_name, module_exists
from kvp.progress import quiet_logs

TEXT_SUFFIXES = (".txt", ".md")
"""Files that are one running text."""


@dataclass(frozen=True)
class Unreadable:
    """A row that is no row, and why, as the end of a sentence ("is not JSON")."""

    reason: str


Row = tuple[str, Mapping[str, Any] | Unreadable]
"""Location of a row in its data ("line 7") and its columns."""


def read_rows(data: str, flag: str) -> Iterator[Row]:
    """Rows of a file, a folder or a hub data set (`NAME` or `NAME:CONFIGURATION`), in order.

    All splits of a data set follow one another. Raises UsageError naming `flag` where there is no
    such data or it cannot be read at all.
    """
    path = Path(data)
    if not data.strip():
        raise UsageError(f"--{flag} is empty")
    if path.is_dir():
        yield from _folder(path, flag)
    elif not path.exists() and _is_local(data):
        raise UsageError(f"--{flag} {data}: no such file or folder")
    elif (reader := reader_of(path)) is not None:
        try:
            yield from reader(path)
        except (OSError, UnicodeDecodeError, csv.Error, RecursionError) as error:
            raise UsageError(f"--{flag} {data}: cannot be read ({error})") from error
    elif path.is_file():
        raise UsageError(f"--{flag} {data}: unknown kind of file; use one of {', '.join(KINDS)}")
    else:
        yield from _hub(data, flag)


def reader_of(path: Path) -> Callable[[Path], Iterator[Row]] | None:
    """The reader for the suffix of a path (`.gz` behind it is unpacked), None for another one."""
    return READERS.get(Path(path.name.removesuffix(".gz")).suffix.lower())


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


def _open(path: Path) -> IO[str]:
    opener = gzip.open if path.suffix == ".gz" else open
    return cast("IO[str]", opener(path, "rt", encoding="utf-8-sig", newline=""))


def _json_lines(path: Path) -> Iterator[Row]:
    with _open(path) as lines:
        for number, line in enumerate(lines, start=1):
            if line.strip():
                yield f"line {number}", _object(line)


def _object(line: str) -> Mapping[str, Any] | Unreadable:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        return Unreadable(f"is not JSON ({error})")
    return row if isinstance(row, dict) else Unreadable("is not a JSON object")


def _json(path: Path) -> Iterator[Row]:
    """A list of objects, an object with one such list, or lines with an object each."""
    with _open(path) as file:
        try:
            content = json.load(file)
        except (json.JSONDecodeError, RecursionError):
            content = None
    if content is None:
        yield from _json_lines(path)
        return
    if isinstance(content, dict):
        lists = [value for value in content.values() if isinstance(value, list)]
        if len(content) == len(lists) == 1:
            content = lists[0]
    for number, row in enumerate(content if isinstance(content, list) else [content], start=1):
        whole = isinstance(row, dict)
        yield f"row {number}", row if whole else Unreadable("is not a JSON object")


def _csv(path: Path) -> Iterator[Row]:
    delimiter = "\t" if ".tsv" in path.suffixes else ","
    csv.field_size_limit(2**31 - 1)  # a cell may hold a book
    with _open(path) as file:
        reader = csv.DictReader(file, delimiter=delimiter)
        for row in reader:
            extra = None in row
            location = f"line {reader.line_num}"
            yield location, Unreadable("has more cells than the header") if extra else row


def _parquet(path: Path) -> Iterator[Row]:
    from datasets import load_dataset

    files = glob.escape(str(path))
    try:
        with quiet_logs():
            rows = load_dataset("parquet", data_files=files, split="train", streaming=True)
            yield from _parts(rows)
    except Exception as error:  # whatever pyarrow makes of a damaged file
        raise OSError(_first_line(error)) from error


def _folder(folder: Path, flag: str) -> Iterator[Row]:
    saved = [path for path in (folder, *sorted(folder.iterdir())) if _is_saved(path)]
    for path in saved:  # this folder, or one for each configuration of a data set
        for location, row in _saved(path, flag):
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
        name = file.relative_to(folder)
        for location, row in read_rows(str(file), flag):
            yield f"{name} {location}", row


def _is_saved(folder: Path) -> bool:
    """Whether `save_to_disk` wrote a folder."""
    return any((folder / name).is_file() for name in ("dataset_dict.json", "state.json"))


def _saved(folder: Path, flag: str) -> Iterator[Row]:
    from datasets import load_from_disk

    try:
        yield from _parts(load_from_disk(str(folder)))
    except Exception as error:  # whatever a foreign or damaged folder can raise
        raise UsageError(f"--{flag} {folder}: cannot be read ({_first_line(error)})") from error


def _is_local(data: str) -> bool:
    """Whether a name can only be that of a file or folder, not of a data set of the hub."""
    return (
        reader_of(Path(data)) is not None or data.startswith((".", "/", "~")) or data.count("/") > 1
    )


def _hub(name: str, flag: str) -> Iterator[Row]:
    from datasets import load_dataset

    if is_object_name(name) and module_exists(name):
        raise UsageError(
            f"--{flag} {name}: sources of your own are read by kvp-collect and kvp-train; here "
            "write a task and give it by --tasks (docs/data.md)"
        )
    base, _, configuration = name.partition(":")
    try:
        with quiet_logs():
            loaded = load_dataset(base, configuration or None)
        yield from _parts(loaded)
    except Exception as error:  # whatever a hub, a cache or a foreign file format can raise
        raise UsageError(
            f"--{flag} {name}: not a file ({', '.join(KINDS)}), a folder of such files, a folder "
            f"of save_to_disk or a data set that loads ({_first_line(error)})"
        ) from error


def _parts(loaded: Any) -> Iterator[Row]:  # noqa: ANN401
    """Rows of all parts of a data set, or of its only one."""
    for part, rows in loaded.items() if isinstance(loaded, dict) else [("", loaded)]:
        for number, row in enumerate(rows, start=1):
            yield f"{part} row {number}".strip(), row


def _first_line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0] or type(error).__name__


READERS: Mapping[str, Callable[[Path], Iterator[Row]]] = {
    ".jsonl": _json_lines,
    ".ndjson": _json_lines,
    ".json": _json,
    ".csv": _csv,
    ".tsv": _csv,
    ".parquet": _parquet,
}
"""Readers by suffix."""

KINDS = (*READERS, *TEXT_SUFFIXES)
"""Suffixes of files that can be read."""

SHARES = {
    "train": (0.0, 0.8),
    "validation": (0.8, 0.9),
    "test": (0.9, 1.0),
    "all": (0.0, 1.0),
}
"""Which part of a text each split owns, as fractions of its length."""


def read_text(path: str, flag: str) -> str:
    """A text file, or all `*.txt` of a folder in the order of their names.

    Raises UsageError naming `flag` when there is none or it cannot be read.
    """
    source = Path(path)
    files = sorted(source.glob("*.txt")) if source.is_dir() else [source]
    if not files:
        raise UsageError(f"--{flag} {path}: no .txt file in this folder")
    try:
        text = "\n\n".join(file.read_text(encoding="utf-8") for file in files)
    except (OSError, UnicodeDecodeError) as error:
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
