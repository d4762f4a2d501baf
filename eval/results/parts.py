"""Records of several workers, or of a folder in an object store, where nothing can be appended to.

Each prompt's records are a file of their own, `rows/DIGEST.jsonl`, until a worker that finds all of
them there joins them to rows.jsonl. Joining twice gives the same file.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

from eval.results.folder import ROWS
from eval.results.records import KEY_FIELDS, Key, Record, RecordFile, key_of, read_records
from kvp.artifacts.addresses import Place, files_below, make_folder, place
from kvp.artifacts.copies import cache_folder, fetch, staging_folder
from kvp.artifacts.files import is_partial
from kvp.artifacts.jsonl import JsonLines
from kvp.errors import AddressError, ResultsError
from kvp.manifest import digest_json

PARTS = "rows"
"""Folder of the parts."""
_READERS = 16
"""Parts that are read at the same time."""


class RecordParts(RecordFile):
    """rows.jsonl and its parts in a results folder, on a disk or in an object store."""

    def __init__(self, folder: Place) -> None:
        """Read what is there; raises ResultsError on damage."""
        self.path = folder / ROWS
        self.keys = set()
        self.digests = {}
        self._folder = folder / PARTS
        self._known: set[str] = set()
        self.refresh()

    def refresh(self) -> None:
        """Read the records of other workers; raises ResultsError on damage."""
        for record in self._read(self._names() - self._known):
            self._remember(record)

    def append(self, records: Iterable[Record]) -> None:
        """Write records that are not there yet as one part; other workers see all or none."""
        new = [record for record in records if key_of(record) not in self.keys]
        if new:
            name = f"{digest_json(sorted(map(str, map(key_of, new))))[:32]}.jsonl"
            make_folder(self._folder)
            JsonLines(self._folder / name).rewrite(new)
            for record in new:
                self._remember(record)
            self._known.add(name)

    def join(self, file: Path) -> None:
        """Write all records, in the order of their keys, to a file."""
        records: dict[Key, Record] = {}
        for record in self._read(self._names()):
            records.setdefault(key_of(record), record)
        JsonLines(file).rewrite(records[key] for key in sorted(records, key=str))

    def delete(self) -> None:
        """Delete the parts whose records are in rows.jsonl."""
        for name in self._known:
            (self._folder / name).unlink(missing_ok=True)
        if isinstance(self._folder, Path):
            with suppress(OSError):  # a worker that was started again wrote one
                self._folder.rmdir()

    def _names(self) -> set[str]:
        return {name for name, _ in files_below(self._folder) if not is_partial(name)}

    def _read(self, names: set[str]) -> Iterator[Record]:
        """Records of some parts, and then of rows.jsonl: where another worker joins them, a part
        that is gone is in there by then.
        """
        with ThreadPoolExecutor(_READERS, thread_name_prefix="parts") as threads:
            for records in threads.map(self._part, sorted(names)):
                yield from records
        self._known |= names
        if self.path.exists():
            yield from read_records(self.path, KEY_FIELDS)

    def _part(self, name: str) -> list[Record]:
        try:
            return [*read_records(self._folder / name, KEY_FIELDS)]
        except ResultsError:
            if (self._folder / name).exists():
                raise
            return []


def results_folder(name: str) -> Path:
    """A results folder that a user names; where it lies elsewhere or in parts, a whole copy of it.

    Raises AddressError where there is none at an address.
    """
    found = place(name)
    if isinstance(found, Path) and not (found / PARTS).is_dir():
        return found
    folder = cache_folder() / "results" / staging_folder(found).name / found.absolute().name
    for old, _ in [*files_below(folder)]:
        (folder / old).unlink()
    names = [inner for inner, _ in files_below(found)]
    if not names:
        raise AddressError(f"{found} does not exist; is this a results folder?")
    fetch(found, folder, [inner for inner in names if "/" not in inner])
    RecordParts(found).join(folder / ROWS)
    return folder
