"""Records of a results folder in an object store, where nothing can be appended to.

Every worker keeps rows.jsonl on its own disk and writes an object per prompt, `rows/DIGEST.jsonl`,
as soon as it has the records; the worker that closes the run sends rows.jsonl whole and deletes
these parts. So a finished folder holds what one on a disk does, and a killed run loses one prompt.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from pathlib import Path
from tempfile import TemporaryDirectory

from eval.results.records import KEY_FIELDS, Record, RecordFile, key_of, read_records
from kvp.artifacts.addresses import ObjectPath, files_below, place
from kvp.artifacts.copies import cache_folder, fetch, staging_folder
from kvp.artifacts.jsonl import JsonLines
from kvp.errors import AddressError
from kvp.manifest import digest_json

PARTS = "rows"
"""Folder of the parts."""
_LIST_SECONDS = 1.0
"""For how long a list of the parts is believed."""


class SharedRecordFile(RecordFile):
    """rows.jsonl on this disk, and its parts in an object store."""

    def __init__(self, path: Path, folder: ObjectPath) -> None:
        """Read the file, where it is there, and all parts; raises ResultsError on damage."""
        super().__init__(path)
        self._folder = folder / PARTS
        self._merged: set[str] = set()
        self._listed = 0.0
        self._fetch_new()

    def refresh(self, *, now: bool = False) -> None:
        """Fetch the records of other workers, without `now` at most once a second."""
        if now or time.monotonic() - self._listed > _LIST_SECONDS:
            self._fetch_new()

    def append(self, records: Iterable[Record]) -> None:
        """Write records that are not there yet, as one object; other workers see all or none."""
        new = [record for record in records if key_of(record) not in self.keys]
        super().append(new)
        if new:
            name = f"{digest_json(sorted(map(str, map(key_of, new))))[:32]}.jsonl"
            with TemporaryDirectory() as folder:
                JsonLines(Path(folder) / name).rewrite(new)
                (self._folder / name).write_bytes((Path(folder) / name).read_bytes())
            self._merged.add(name)

    def delete_parts(self) -> None:
        """Delete the parts whose records are in the file; only once it has been sent whole."""
        for name in sorted(self._merged):
            (self._folder / name).unlink()

    def _fetch_new(self) -> None:
        self._listed = time.monotonic()
        names = {name for name, _ in files_below(self._folder)} - self._merged
        with TemporaryDirectory() as folder:
            fetch(self._folder, Path(folder), sorted(names))
            for name in sorted(names):
                part = Path(folder) / name
                if part.exists():  # else its records have become part of rows.jsonl meanwhile
                    super().append(read_records(part, KEY_FIELDS))
                    self._merged.add(name)


def results_folder(name: str) -> Path:
    """A results folder that a user names, fetched where it lies in an object store."""
    found = place(name)
    return fetched_results(found) if isinstance(found, ObjectPath) else found


def fetched_results(address: ObjectPath) -> Path:
    """A results folder of an object store as it is now, in the cache, with its parts joined.

    Raises AddressError where there is none.
    """
    folder = cache_folder() / "results" / staging_folder(address).name / address.name
    for name, _ in [*files_below(folder)]:
        (folder / name).unlink()
    names = [name for name, _ in files_below(address)]
    if not names:
        raise AddressError(f"{address} does not exist; is this a results folder?")
    fetch(address, folder, [name for name in names if "/" not in name])
    SharedRecordFile(folder / "rows.jsonl", address)
    return folder
