"""Records in parts: files `rows/DIGEST.jsonl`, one for each prompt, which are joined at the end.

Used where several workers write, and in an object store, where nothing can be appended to. A worker
that finds all parts there joins them to rows.jsonl. Joining twice gives the same file.
"""

from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

from eval.results.record_names import ROWS
from eval.results.record_schemas import RESULTS_ROWS
from eval.results.records import Record, RecordFile, key_of, read_records
from kvp.artifacts.addresses import Place, files_below, place
from kvp.artifacts.files import (
    JsonLines,
    cache_folder,
    copy_files,
    digest_json,
    is_partial,
    staging_folder,
)
from kvp.errors import AddressError, ResultsError

PARTS = "rows"
_READERS = 16


class RecordParts(RecordFile):
    """rows.jsonl and its parts in a results folder, on a disk or in an object store."""

    def __init__(self, folder: Place) -> None:
        """Read what is there; raises ResultsError on damage."""
        self._folder = folder / PARTS
        self._known: set[str] = set()
        super().__init__(folder / ROWS)

    def refresh(self) -> None:
        """Read the records of other workers; raises ResultsError on damage."""
        self._remember(self._read(self._names() - self._known))

    def append(self, records: Iterable[Record]) -> None:
        """Write records that are not there yet as one part; other workers see all or none."""
        new = [record for record in records if key_of(record) not in self.values]
        if new:
            name = f"{digest_json(sorted(map(str, map(key_of, new))))[:32]}.jsonl"
            self._folder.mkdir(parents=True, exist_ok=True)
            JsonLines(self._folder / name, RESULTS_ROWS.check).rewrite(new)
            self._remember(new)
            self._known.add(name)

    def write_whole(self, file: Path) -> None:
        """Write all records, in the order of their keys, to a file."""
        records: dict[tuple[object, ...], Record] = {}
        for record in self._read(self._names()):
            records.setdefault(key_of(record), record)
        JsonLines(file, RESULTS_ROWS.check).rewrite(
            records[key] for key in sorted(records, key=str)
        )

    def delete_parts(self) -> None:
        """Delete the parts whose records are in rows.jsonl."""
        for name in self._known:
            (self._folder / name).unlink(missing_ok=True)
        if isinstance(self._folder, Path):
            with suppress(OSError):  # a worker that was started again wrote one
                self._folder.rmdir()

    def _names(self) -> set[str]:
        return {name for name, _ in files_below(self._folder) if not is_partial(name)}

    def _read(self, names: set[str]) -> Iterator[Record]:
        """Records of some parts, then of rows.jsonl, where those of deleted parts are."""
        with ThreadPoolExecutor(_READERS, thread_name_prefix="parts") as threads:
            for records in threads.map(self._part, sorted(names)):
                yield from records
        self._known |= names
        if self.path.exists():
            yield from read_records(self.path, RESULTS_ROWS)

    def _part(self, name: str) -> list[Record]:
        try:
            return [*read_records(self._folder / name, RESULTS_ROWS)]
        except ResultsError:
            if (self._folder / name).exists():
                raise
            return []


def fetch_results_folder(name: str) -> Path:
    """A local results folder, or a copy of one elsewhere or in parts; AddressError for none."""
    source = place(name)
    if isinstance(source, Path) and not (source / PARTS).is_dir():
        return source
    folder = cache_folder() / "results" / staging_folder(source).name / source.absolute().name
    for old, _ in [*files_below(folder)]:
        (folder / old).unlink()
    names = [inner for inner, _ in files_below(source)]
    if not names:
        raise AddressError(f"{source} does not exist; is this a results folder?")
    copy_files(source, folder, [inner for inner in names if "/" not in inner])
    RecordParts(source).write_whole(folder / ROWS)
    return folder
