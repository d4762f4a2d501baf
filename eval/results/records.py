"""Records of a results folder: rows.jsonl is append-only, a run resumes by the keys in it.

All records of one prompt are appended in one write (`kvp.artifacts.files`), so an interrupted run
repeats whole prompts. Where several workers write, and in an object store, where nothing can be
appended to, each prompt's records are a file of their own, `rows/DIGEST.jsonl`, until a worker that
finds all of them there joins them to rows.jsonl. Joining twice gives the same file.
`docs/formats.md` defines the fields.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

from eval.results.names import MANIFEST, ROWS, TIMING
from eval.results.shapes import CHECKS
from kvp.artifacts.addresses import Place, files_below, place
from kvp.artifacts.files import (
    JsonLines,
    cache_folder,
    copy_files,
    digest_json,
    is_partial,
    staging_folder,
)
from kvp.artifacts.manifest import read_sealed_json, sha256_file, write_sealed_json
from kvp.errors import AddressError, ResultsError

RECORDS = (ROWS, TIMING)
_SEALED = (*RECORDS, "settings.json", "settings.csv", "budgets.json")
"""Files whose digests the manifest of a finished folder holds, where they are there."""

Record = dict[str, Any]
Key = tuple[Any, ...]
Item = TypeVar("Item")
Groups = Mapping[str | None, str]
"""Group of every policy label (`policy_groups`)."""

_METHOD_KEY = ("model", "method", "variant", "allocator", "protected", "policy", "protocol")
KEY_FIELDS = (*_METHOD_KEY, "task", "budget_spec", "example")
"""Fields that together identify a record."""
TIMING_KEY = (*_METHOD_KEY, "budget_spec")
SETTING_FIELDS = ("method", "variant", "allocator", "policy", "protected", "budget_spec")
"""Fields that tell records of one prompt under one protocol apart."""
_CHECKS = {KEY_FIELDS: CHECKS[ROWS], TIMING_KEY: CHECKS[TIMING]}


def record_lines(path: Place, key_fields: Sequence[str]) -> JsonLines:
    """A file of records of these keys, checked when they are written and when they are read."""
    return JsonLines(path, _CHECKS.get(tuple(key_fields)))


def seal(folder: Path) -> None:
    """Put the digests of the files into the manifest of a folder whose run ends."""
    while altered_part(folder, manifest := read_sealed_json(folder / MANIFEST, ResultsError)):
        write_sealed_json(folder / MANIFEST, {**manifest, "files": _digests(folder)})


def altered_part(folder: Path, manifest: Mapping[str, Any]) -> str:
    """How files differ from the digests of the last finished run, in words; "" if they do not."""
    files, digests = manifest.get("files"), _digests(folder)
    if not isinstance(files, dict) or not files:
        return "the last run has not ended" if "files" in manifest else ""
    names = sorted(name for name in {*files, *digests} if files.get(name) != digests.get(name))
    return f"the last run left another {' and '.join(names)}" if names else ""


def _digests(folder: Path) -> dict[str, str]:
    return {name: sha256_file(folder / name) for name in _SEALED if (folder / name).exists()}


def key_of(record: Mapping[str, Any], fields: Iterable[str] = KEY_FIELDS) -> Key:
    """Values of some fields of a record; KeyError where it lacks one."""
    return tuple(record[field] for field in fields)


def group_by(items: Iterable[Item], key: Callable[[Item], Hashable]) -> dict[Any, list[Item]]:
    """Items by their key; groups, and items within one, are in the order given."""
    groups: dict[Any, list[Item]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return groups


def value_of(record: Mapping[str, Any]) -> float:
    """The score of an answer, or the log-likelihood per token of a given reply: more is better."""
    if record["nll"] is None:
        return float(record["score"])
    return -float(record["nll"]) / float(record["reply_tokens"])


def policy_groups(records: Iterable[Mapping[str, Any]]) -> dict[str | None, str]:
    """Group of every policy label: the label without its training seed.

    Policies of one group are averaged. Where there is only one group, its name is "".
    """
    seeds = {row["policy"]: row["policy_seed"] for row in records if row["policy"] is not None}
    names = {label: without_seed(label, seed) for label, seed in seeds.items()}
    if len(set(names.values())) <= 1:
        names = dict.fromkeys(names, "")
    return {None: "", **names}


def without_seed(label: str, seed: float | None) -> str:
    """Label of a policy without its training seed: the name of its group."""
    if seed is None:
        return label
    return re.sub(rf"[-_. ]*(seed|s)?[-_. ]*(?<!\d){int(seed)}\Z", "", label)


class RecordFile:
    """rows.jsonl of a results folder, and keys and values of the records that it holds."""

    def __init__(self, path: Place) -> None:
        """Read what is there; raises ResultsError on damage."""
        self.path = path
        self.values: dict[Key, float] = {}
        """Value of every record (`value_of`), by its key."""
        self.digests: dict[tuple[str, str], str] = {}
        """Task and example -> digest of the prompt (`Sample.digest`)."""
        self.refresh()

    def refresh(self) -> None:
        """Read the file, dropping a torn last line; raises ResultsError on damage."""
        record_lines(self.path, KEY_FIELDS).cut_torn_line()
        self._remember(read_records(self.path, KEY_FIELDS) if self.path.exists() else ())

    def append(self, records: Iterable[Record]) -> None:
        """Append records in one write, flushed to the disk."""
        records = list(records)
        record_lines(self.path, KEY_FIELDS).append(records)
        self._remember(records)

    def _remember(self, records: Iterable[Record]) -> None:
        for record in records:
            self.values[key_of(record)] = value_of(record)
            self.digests[record["task"], record["example"]] = record["prompt_digest"]


def read_records(path: Place, key_fields: Sequence[str] = ()) -> Iterator[Record]:
    """Records of a JSON-lines file in order, without a torn last line.

    Raises ResultsError, naming file and line, on a missing file, on a damaged line before the last,
    where different records have the same key, and where a record has another shape.
    """
    if not path.exists():
        raise ResultsError(f"{path} does not exist; is this a results folder?")
    lines: dict[Key, tuple[int, int]] = {}
    for number, record in record_lines(path, key_fields).numbered():
        key = key_of(record, key_fields)
        this = number, hash(repr(record))
        first = lines.setdefault(key, this) if key_fields else this
        if first[1] != this[1]:
            raise ResultsError(f"{path} line {number} repeats line {first[0]}; delete that line")
        if first == this:  # else a writer was stopped, and another one took its place
            yield record


def merge_records(path: Path, records: Iterable[Record], key_fields: Sequence[str]) -> None:
    """Rewrite a JSON-lines file: the given records replace those with the same key."""
    there = read_records(path, key_fields) if path.exists() else ()
    merged = {key_of(record, key_fields): record for record in (*there, *records)}
    record_lines(path, key_fields).rewrite(merged.values())


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
            record_lines(self._folder / name, KEY_FIELDS).rewrite(new)
            self._remember(new)
            self._known.add(name)

    def join(self, file: Path) -> None:
        """Write all records, in the order of their keys, to a file."""
        records: dict[Key, Record] = {}
        for record in self._read(self._names()):
            records.setdefault(key_of(record), record)
        record_lines(file, KEY_FIELDS).rewrite(records[key] for key in sorted(records, key=str))

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
        """Records of some parts, then of rows.jsonl, where those of deleted parts are."""
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
    RecordParts(source).join(folder / ROWS)
    return folder
